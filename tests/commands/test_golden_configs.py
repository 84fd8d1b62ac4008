"""A digest of what decides the numbers of each config: a changed default is a changed experiment.

Nothing is compared of the job, nor of encodings that a config does not use, whose defaults
docs/encodings.md holds.

python -m tests.commands.test_golden_configs               # writes the digests
python -m tests.commands.test_golden_configs HEAD quick    # what changed in a config since a commit
"""

import dataclasses
import difflib
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cope_jax.encodings import ENCODINGS
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden.json")
CHANGED = (
    "the recipe of {name} has changed: python -m tests.commands.test_golden_configs HEAD {name} shows "
    "how. If a default was changed by mistake, put it back. If it was on purpose, say so in the CHANGELOG, "
    "for earlier results are of another experiment, and write the digests: "
    "python -m tests.commands.test_golden_configs"
)


def names() -> list[str]:
    """The configs with a digest. Version 2 of abilities is frozen, see tests/runs/grid/test_cells.py."""
    return [name for name in config_files.names() if not name.endswith("_v2")]


def recipe(name: str) -> str:
    """The recipe, every default filled in, and the options that the file sets of encodings that it
    does not use.
    """
    config = ExperimentConfig.from_mapping(config_files.named(name).to_dict())
    resolved = config.recipe()
    for encoding, options in config.encodings.items():
        defaults = dataclasses.asdict(ENCODINGS.get(encoding).Config())
        chosen = {option: value for option, value in options.items() if value != defaults[option]}
        if chosen:
            resolved["encodings"].setdefault(encoding, chosen)
    return json.dumps(resolved, indent=1, sort_keys=True, ensure_ascii=False)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.newest
def test_every_config_comes_to_the_same_as_ever():
    golden = json.loads(GOLDEN.read_text())
    changed = [name for name in names() if golden.get(name) != digest(recipe(name))]
    assert not changed, "\n".join(CHANGED.format(name=name) for name in changed)
    assert set(golden) == set(names()), "write the digests again"


def test_the_recipe_has_defaults_and_what_a_file_sets_for_other_encodings():
    options: dict[str, Any] = json.loads(recipe("selective_copy:small"))
    assert (
        options["encodings"]["relative"] == {"max_distance": 96}
        and "alibi" not in options["encodings"]
    )
    assert options["encodings"]["cope"]["gate"] and options["optimizer"]["beta1"]
    assert "job" not in options


def difference(commit: str, name: str) -> str:
    """A diff of the recipe of a config in a commit and here."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        code = f"from tests.commands.test_golden_configs import recipe; print(recipe({name!r}))"
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONPATH": folder}
        before = subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True
        ).stdout
    lines = (text.splitlines() for text in (before, recipe(name)))
    return "\n".join(difflib.unified_diff(*lines, commit, "here", lineterm=""))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(difference(*sys.argv[1:]))
    else:
        digests = {name: digest(recipe(name)) for name in names()}
        GOLDEN.write_text(json.dumps(digests, indent=1) + "\n")
