"""What each config file comes to, every default filled in: a changed default is a changed experiment."""

import json
import sys
from pathlib import Path

import pytest

from tests.experiments import shrink

GOLDEN = Path(__file__).parent / "golden"
CHANGED = (
    "what {name}.py comes to has changed. If a default was changed by mistake, put it back. If it was on purpose, "
    "say so in the CHANGELOG, for earlier results are of another experiment, and write the new one: "
    "python -m tests.experiments.test_golden_configs"
)


def resolved(path: Path) -> str:
    return json.dumps(shrink.load(path).to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.newest
@pytest.mark.parametrize("path", shrink.CONFIGS, ids=lambda path: path.stem)
def test_a_config_comes_to_the_same_as_ever(path):
    golden = GOLDEN / f"{path.stem}.json"
    assert golden.exists(), f"{path.name} is new: python -m tests.experiments.test_golden_configs"
    assert json.loads(golden.read_text()) == json.loads(resolved(path)), CHANGED.format(name=path.stem)


def test_no_golden_config_is_left_behind():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {path.stem for path in shrink.CONFIGS}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.json"):
        old.unlink()
    for path in shrink.CONFIGS:
        (GOLDEN / f"{path.stem}.json").write_text(resolved(path))
    print(*sorted(GOLDEN.iterdir()), sep="\n", file=sys.stderr)
