"""Pages are complete: each encoding, model, task, command and config has its row."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from cope_jax import encodings, models, positions, tasks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
ENCODINGS = (ROOT / "docs" / "encodings.md").read_text()


def test_nothing_is_left_out():
    chosen = ENCODINGS.split("\n## Positions\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in chosen for name in positions.SAMPLERS)
    files = {path.name for path in (ROOT / "cope_jax" / "configs").glob("[!_]*.py")}
    assert set(re.findall(r"`(\w+\.py)`", COMMANDS)) == files
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| .* \|$", ENCODINGS.split("\n## The contract\n")[0], re.MULTILINE
    )
    assert sorted(rows) == list(encodings.names()), (
        f"docs/encodings.md needs one row for each: {set(rows) ^ set(encodings.names())}"
    )
    executions = re.findall(r"^\| `(\w+)` \| [✓–] \|", ENCODINGS, re.MULTILINE)
    assert executions == list(encodings.names()), (
        "tests/encodings/test_executions.py prints the table"
    )


def test_the_readme_is_short():
    lines = [
        line for line in README.splitlines() if not line.startswith("[")
    ]  # without the addresses of links
    assert len(lines) <= 150 and [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("package", [models, tasks], ids=["models", "tasks"])
def test_every_model_and_task_has_its_row(package):
    page = (ROOT / "docs" / f"{package.__name__.rpartition('.')[2]}.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", page.split("\n## In the training data\n")[0], re.MULTILINE)
    names = sorted(re.findall(r"`(\w+)`", " ".join(rows)))
    assert names == list(package.names()), (
        f"docs/ needs one row for each: {set(names) ^ set(package.names())}"
    )


def test_every_ability_has_its_tasks():
    page = (ROOT / "docs" / "tasks.md").read_text()
    listed = {
        ability: tuple(re.findall(r"`(\w+)`", names))
        for ability, names in re.findall(r"^- `(\w+)`, to .*?: (`.*`)$", page, re.MULTILINE)
    }
    measuring = {ability: tasks.names(ability) for ability in tasks.ABILITIES}
    wrong = {
        ability: ", ".join(f"`{name}`" for name in names)
        for ability, names in measuring.items()
        if listed.get(ability) != names
    }
    assert not wrong, f"docs/tasks.md must list these tasks of these abilities: {wrong}"
    assert listed.keys() == measuring.keys()


def test_the_picture_of_the_package_shows_every_room_and_tool():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `((?:cope_jax|tools)[\w.]*)` \| (.*?) \|$", page, re.MULTILINE))
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts): {
            other.stem for other in path.parent.glob("[!_]*.py")
        }
        for package in ("cope_jax", "tools")
        for path in (ROOT / package).rglob("__init__.py")
    }
    rooms = {name for name, modules in packages.items() if modules}
    assert set(rows) | {"cope_jax"} == rooms - {name for name in rooms if ".samples" in name}
    assert sorted(re.findall(r"`(\w+)`", rows["tools"])) == sorted(packages["tools"])


def test_the_arrows_of_the_picture_are_imports():
    picture = (
        (ROOT / "docs" / "architecture.md").read_text().split("flowchart TD\n")[1].split("```")[0]
    )
    for line in re.sub(r'\[".*?"\]', "", picture).splitlines():
        ends = [[name.strip() for name in end.split("&")] for end in line.split("-->")]
        for uppers, lowers in itertools.pairwise(ends):
            for upper, lower in itertools.product(uppers, lowers):
                code = "".join(
                    path.read_text() for path in (ROOT / "cope_jax" / upper).rglob("*.py")
                )
                assert re.search(
                    rf"^from cope_jax(\.{lower}\b| import .*\b{lower}\b)", code, re.M
                ), (upper, lower)


def test_every_encoding_has_its_page_with_every_option_and_default():
    sections = dict(
        re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", ENCODINGS, re.DOTALL | re.MULTILINE)
    )
    assert sorted(sections) == list(encodings.names())
    for name, text in sections.items():
        written = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.MULTILINE))
        fields = dataclasses.fields(encodings.ENCODINGS.get(name).Config)
        assert written == {option.name: repr(option.default) for option in fields}, name
