"""What decides the numbers of each config file, every default filled in: a changed default is a changed experiment.

A golden file holds the recipe of its config: neither the job nor the options of encodings that the config does not use,
whose defaults docs/encodings.md holds, compared by a test.
A golden file may lack a new field or option whose default keeps the former behaviour.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cope_jax.encodings import ENCODINGS
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands import shrink

GOLDEN = Path(__file__).parent / "golden"
CHANGED = (
    "what {name}.py comes to has changed. If a default was changed by mistake, put it back. If it was on purpose, "
    "say so in the CHANGELOG, for earlier results are of another experiment, and write the new one: "
    "python -m tests.commands.test_golden_configs"
)


def resolved(config: ExperimentConfig) -> dict[str, Any]:
    """The recipe, and what the file sets of encodings that it does not use, with which `compare` runs."""
    recipe = config.recipe()
    for name, options in config.encodings.items():
        defaults = dataclasses.asdict(ENCODINGS.get(name).Config())
        chosen = {option: value for option, value in options.items() if value != defaults[option]}
        if chosen:
            recipe["encodings"].setdefault(name, chosen)
    return json.loads(json.dumps(recipe))


def defaults_of(config: ExperimentConfig) -> dict[str, Any]:
    """The recipe of the same task, model and encoding with nothing else chosen."""
    task = config_files.experiment(config.task.name)
    bare = ExperimentConfig.from_mapping({**task.to_dict(), "model": {"name": config.model.name}})
    return resolved(dataclasses.replace(bare, encoding=config.encoding))


def filled(golden: Any, defaults: Any) -> Any:
    """`golden` with what it lacks of the defaults."""
    if not isinstance(golden, dict) or not isinstance(defaults, dict):
        return golden
    return defaults | {name: filled(value, defaults.get(name)) for name, value in golden.items()}


@pytest.mark.newest
@pytest.mark.parametrize("path", shrink.CONFIGS, ids=lambda path: path.stem)
def test_a_config_comes_to_the_same_as_ever(path):
    golden = GOLDEN / f"{path.stem}.json"
    assert golden.exists(), f"{path.name} is new: python -m tests.commands.test_golden_configs"
    config = shrink.load(path)
    expected = filled(json.loads(golden.read_text()), defaults_of(config))
    assert resolved(config) == expected, CHANGED.format(name=path.stem)


def test_what_is_new_may_lack_and_what_changes_may_not():
    config = shrink.load(next(path for path in shrink.CONFIGS if path.stem == "selective_copy_small"))
    golden, defaults = resolved(config), defaults_of(config)
    assert golden["encodings"]["relative"] == {"max_distance": 96}
    assert "alibi" not in golden["encodings"]
    del golden["encodings"]["cope"]["gate"], golden["optimizer"]["beta1"]
    assert filled(golden, defaults) == resolved(config)
    for changed in ("npos_max", "slope"):  # set by the file; a default
        options = config.encodings["cope"] | {changed: 5}
        other = dataclasses.replace(config, encodings=config.encodings | {"cope": options})
        assert filled(golden, defaults) != resolved(other)
    del golden["encodings"]["cope"]["npos_max"]
    assert filled(golden, defaults) != resolved(config)


def test_no_golden_config_is_left_behind():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {path.stem for path in shrink.CONFIGS}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.json"):
        old.unlink()
    for path in shrink.CONFIGS:
        text = json.dumps(resolved(shrink.load(path)), indent=1, sort_keys=True, ensure_ascii=False)
        (GOLDEN / f"{path.stem}.json").write_text(text + "\n")
    print(*sorted(GOLDEN.iterdir()), sep="\n", file=sys.stderr)
