"""What README and docs say is so: their Python runs, their commands and options exist, nothing is left out."""

import ast
import dataclasses
import importlib.util
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import experiments
from cope_jax import encodings, models, positions, tasks
from cope_jax.training import config_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXCHANGE = (ROOT / "docs" / "exchange.md").read_text()
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
CONTEXTUAL = (ROOT / "docs" / "contextual.md").read_text()
TEXT = (ROOT / "docs" / "text.md").read_text()
ENCODINGS = (ROOT / "docs" / "encodings.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "experiments" / "RESULTS.md"]
CONFIGS = {
    "tag": {"config": "tagger.py", "bert_config": "bert_tagger.py"},
    "classify": {"config": "spam.py"},
}
"""Of commands that need not be given any."""

LINE = re.compile(r"(?P<code>\S.*?)  # (?P<shown>.*)")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The words of every line of shell, comments left out."""
    pages = (README, COMMANDS, CONTEXTUAL, EXCHANGE, TEXT)
    shell = "".join(block for page in pages for block in blocks("sh", page)).replace("\\\n", " ")
    return [words for line in shell.splitlines() if (words := shlex.split(line, comments=True))]


def flags(command: str) -> set[str]:
    """The flags that a command defines."""
    spec = importlib.util.find_spec(f"experiments.{command}")
    assert spec is not None and spec.origin is not None, f"there is no experiments.{command}"
    path = Path(spec.origin)
    path = path.with_name("__main__.py") if spec.submodule_search_locations else path
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if is_flag(node)]
    return {ast.literal_eval(call.args[0]) for call in calls}


def is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("DEFINE")


def config_of(flags: dict[str, str], flag: str = "config", command: str = "") -> Any:
    path = flags.get(flag) or f"experiments/configs/{CONFIGS[command][flag]}"
    return config_files.named(str(ROOT / path))


def field(config: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        assert name in config, f"there is no --{path}"
        config = config[name]
    return config


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("README.md", marks=pytest.mark.newest),
        *(f"docs/{name}.md" for name in ("python", "own_code", "exchange", "text")),
    ],
)
def test_python_runs_and_shows_what_the_comments_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what it writes
    names: dict[str, Any] = {}
    shown = 0
    for block in blocks("python", (ROOT / page).read_text()):
        exec(compile(block, page, "exec"), names)
        for match in filter(None, map(LINE.fullmatch, block.splitlines())):
            assert repr(eval(match["code"], names)) == match["shown"], match["code"]
            shown += 1
    assert shown


@pytest.mark.parametrize("words", [w for w in commands() if w[:2] == ["python", "-m"]], ids=lambda words: words[2])
def test_command_has_its_flags_and_values(words):
    given = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
    command = words[2].removeprefix("experiments.")
    known = flags(command)
    assert {name.split(".")[0] for name in given} <= known
    for name, value in given.items():
        if "." in name:
            field(config_of(given, name.split(".")[0], command), name)
        if name in ("encodings", "config.encoding"):
            for label in encodings.split_outside_parentheses(value, ","):
                encodings.EncodingConfig.parse(label, config_of(given).encodings.to_dict())
    if words[2] == "experiments.export":
        options, sizes = (eval(f"dict({given.get(name, '')})") for name in ("options", "sizes"))
        assert set(sizes) in (set(), set(tasks.create(given["task"], **options).splits))


def test_commands_in_sentences_exist():
    config = runpy.run_path(str(ROOT / "experiments" / "configs" / "counting_small.py"))["get_config"]()
    mentioned = re.findall(r"`--(config\.[\w.]+)", COMMANDS)
    assert mentioned
    for path in mentioned:
        field(config, path)


def test_make_knows_its_targets_and_variables():
    makefile = (ROOT / "Makefile").read_text()
    mentioned = re.findall(r"(?:`|^)make ([^`#\n]*)", README + COMMANDS, re.MULTILINE)
    assert mentioned
    for word in " ".join(mentioned).split():
        variable = re.fullmatch(r"([A-Z]+)=.*", word)
        pattern = rf"^{variable[1]} \?=" if variable else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"make {word}"


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    mentioned = re.findall(r"'\.\[(\w+)\]'", README + COMMANDS)
    assert mentioned
    assert set(mentioned) <= set(extras)


def test_nothing_is_left_out():
    chosen = ENCODINGS.split("\n## Positions\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in chosen for name in positions.SAMPLERS)
    files = {path.name for path in (ROOT / "experiments" / "configs").glob("[!_]*.py")}
    assert set(re.findall(r"`(\w+\.py)`", COMMANDS)) == files
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", ENCODINGS.split("\n## The contract\n")[0], re.MULTILINE)
    assert sorted(rows) == list(encodings.names())


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150 and [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("package", [models, tasks], ids=["models", "tasks"])
def test_every_model_and_task_has_its_row(package):
    page = (ROOT / "docs" / f"{package.__name__.rpartition('.')[2]}.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == list(package.names())


def test_the_picture_of_the_package_shows_every_room_and_command():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `((?:cope_jax|experiments)[\w.]*)` \| (.*?) \|$", page, re.MULTILINE))
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts): {other.stem for other in path.parent.glob("[!_]*.py")}
        for package in ("cope_jax", "experiments")
        for path in (ROOT / package).rglob("__init__.py")
    }
    rooms = {name for name, modules in packages.items() if modules}
    assert set(rows) | {"cope_jax"} == rooms - {name for name in rooms if ".samples" in name}
    for folder in ("experiments", *(f"experiments.{group}" for group in experiments.GROUPS)):
        assert sorted(re.findall(r"`(\w+)`", rows[folder])) == sorted(packages[folder] - {"experiments"}), folder


def test_every_encoding_has_its_page_with_every_option_and_default():
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", ENCODINGS, re.DOTALL | re.MULTILINE))
    assert sorted(sections) == list(encodings.names())
    for name, text in sections.items():
        written = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.MULTILINE))
        fields = dataclasses.fields(encodings.ENCODINGS.get(name).Config)
        assert written == {option.name: repr(option.default) for option in fields}, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    missing = []
    for link, name in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        target = page.parent / link if link else page
        if not target.exists() or (name and name not in anchors(target.read_text())):
            missing.append(f"{link}#{name}")
    assert not missing


def anchors(text: str) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_exist(page):
    named = re.findall(r"`((?:cope_jax|experiments|tests)/[\w/]+\.py)`", page.read_text())
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
