"""Code blocks of pages: Python runs and shows what it says; commands, flags and values exist."""

import argparse
import ast
import contextlib
import fnmatch
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from ml_collections import ConfigDict

from cope_jax import encodings, tasks
from cope_jax.cli import command_file, config_flags
from cope_jax.training import config_files

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *ROOT.glob("*.md"),
        *sorted(ROOT.glob("docs/**/*.md")),
        ROOT / "experiments" / "RESULTS.md",
    ]
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "sh", "text", "mermaid", "bibtex"}
SHELL = {"cd", "do", "done", "echo", "export", "for", "git", "mountpoint", "source", "sudo"}
"""Words of the shell, and programs that everyone has."""


def blocks(language: str) -> dict[str, list[str]]:
    """The blocks of a language, by page."""
    codes_of = {
        page: [code for _, name, code in BLOCK.findall(text) if name == language]
        for page, text in PAGES.items()
    }
    return {page: codes for page, codes in codes_of.items() if codes}


def commands(shell: str) -> Iterator[list[str]]:
    """The words of each command of a block. A variable of a loop has the first of its values."""
    code = re.sub(r"(^|\s)#.*", r"\1", shell, flags=re.MULTILINE).replace("\\\n", " ")
    for name, value in re.findall(r"\bfor (\w+) in ([^\s;]+)", code):
        code = re.sub(rf"\${name}\b", value, code)
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for ends, words in itertools.groupby(
        lexer, lambda word: bool(word) and not word.strip(";&|()\n")
    ):
        if not ends:
            yield list(itertools.dropwhile(re.compile(r"do|\w+=.*", re.DOTALL).fullmatch, words))


COMMANDS = [
    pytest.param(words, shell, id=f"{page}-{' '.join(words)[:60]}")
    for page, shells in blocks("sh").items()
    for shell in shells
    for words in commands(shell)
    if words and words[0] not in SHELL - {"echo"}
]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page):
    assert {language for _, language, _ in BLOCK.findall(PAGES[page])} <= LANGUAGES
    rest = BLOCK.sub("", PAGES[page])
    assert "```" not in rest and not re.search(r"^ {4}", rest, re.MULTILINE), (
        "code is between fences"
    )


MARKS = {
    "README.md": pytest.mark.newest,
    "docs/attention.md": pytest.mark.slow,
    "docs/coming_from.md": pytest.mark.slow,
    "docs/exchange.md": pytest.mark.slow,
    "docs/hosts.md": pytest.mark.slow,
    "docs/own_code.md": pytest.mark.slow,
    "docs/python.md": pytest.mark.slow,
    "docs/testing.md": pytest.mark.slow,
    "docs/torch.md": pytest.mark.slow,
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(page, ())) for page in blocks("python")]
)
def test_python_runs_and_shows_what_the_comments_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what it writes
    registered = dict(encodings.ENCODINGS._entries)  # without those of pages
    monkeypatch.setattr(encodings.ENCODINGS, "_entries", registered)
    names: dict[str, Any] = {}
    compared = 0
    for block in blocks("python")[page]:
        needed = re.match(r"# needs ([\w-]+)", block)
        if needed and not is_installed(needed[1]):
            compile(block, page, "exec")
            compared += 1  # without the package nothing can be compared
            continue
        with jax.numpy_dtype_promotion("standard"):  # the reader's: Optax's powers need it
            exec(compile(block, page, "exec"), names)
        lines = block.splitlines()
        for node in ast.parse(block).body:
            if isinstance(node, ast.Expr) and node.lineno == node.end_lineno:
                _, _, shown = lines[node.lineno - 1].partition("  # ")
                assert shown in ("", repr(eval(ast.unparse(node), names))), ast.unparse(node)
                compared += bool(shown)
    assert compared, "no line of the page shows what it returns"


def is_installed(distribution: str) -> bool:
    return any(
        package.metadata["Name"] == distribution for package in importlib.metadata.distributions()
    )


# ml_collections reads config files with it.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(("words", "shell"), COMMANDS)
def test_command_exists_with_its_flags_and_values(words, shell, monkeypatch):
    monkeypatch.setattr(tasks.TASKS, "_entries", dict(tasks.TASKS._entries))  # without a config's
    program, *arguments = words
    if program == "echo":
        check_python(shlex.split(" ".join(arguments))[1:], monkeypatch)
    elif program in ("cope-jax", ".venv/bin/cope-jax"):
        check_command(f"cope_jax.commands.{arguments[0]}", arguments[1:], monkeypatch)
    elif program in ("python", "python3", ".venv/bin/python"):
        check_python(arguments, monkeypatch)
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        check_extras(" ".join(arguments))
    elif program.startswith("experiments/launch/"):
        assert (ROOT / program).stat().st_mode & 0o100
    elif not program.startswith(".venv/bin/"):
        assert re.search(rf"#.*\bneeds .*\b{program}\b", shell), (
            f"say in a comment that the block needs {program}"
        )
    for word in words:
        if re.match(r"(cope_jax|docs|experiments|notebooks|tests|tools)/", word):
            assert (ROOT / word).exists(), word


def check_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    option, module, *arguments = words
    if option == "-c":
        compile(module, "-c", "exec")
    elif module in (
        "tools.fuzz",
        "tools.mutants",
        "tools.mutants.generated",
        "tools.publish",
        "tools.torture",
    ) or module.startswith("tests."):
        check_argparse(module, arguments, monkeypatch)
    elif module.startswith(("tools.", "experiments.")):
        check_command(module, arguments, monkeypatch)
    else:
        assert importlib.util.find_spec(module)


COMMON = ("cope_jax.cli.distributed", "cope_jax.cli.engine_flags", "cope_jax.cli.jobs")


def check_command(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses arguments as the command does, and reads values of configs, encodings and tasks."""
    assert importlib.util.find_spec(module), f"there is no {module}"
    # Where config flags look for their fields.
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.chdir(ROOT)
    for name in COMMON:  # define their flags once, for all commands
        importlib.import_module(name)
    for name in (module, f"{module}.__main__"):  # another test may have imported it
        monkeypatch.delitem(sys.modules, name, raising=False)
    # The first removes the flags that the command defines.
    with flagsaver.flagsaver(), only_common_flags():
        names = runpy.run_module(module)
        monkeypatch.setattr(sys, "argv", config_flags.with_defaults(sys.argv))
        assert flags.FLAGS(sys.argv) == sys.argv[:1]
        given = flags.FLAGS.flag_values_dict()
    configs = [
        config_flags.read_config(value)
        for name, value in given.items()
        if name.endswith("config") and value
    ]
    for config in configs:
        for label in encodings.split_outside_parentheses(
            given.get("encodings") or config.encoding, ","
        ):
            encodings.EncodingConfig.parse(label, config.encodings)
    if "parse_assignments" in names and given["task"]:  # of export
        options, sizes = (
            names["parse_assignments"](given[name], name) for name in ("options", "sizes")
        )
        assert set(sizes) in (set(), set(tasks.create(given["task"], **options).splits))


@contextlib.contextmanager
def only_common_flags() -> Iterator[None]:
    """Hides the flags of commands that other tests have imported."""
    table = flags.FLAGS._flags()
    modules = {name: flags.FLAGS.find_module_defining_flag(name) or "" for name in table}
    others = {
        name: table[name]
        for name, module in modules.items()
        if module.startswith(("cope_jax.", "experiments.", "tools."))
    }
    hidden = {name: flag for name, flag in others.items() if modules[name] not in COMMON}
    for name in hidden:
        del table[name]
    try:
        yield
    finally:
        table.update(hidden)


def check_argparse(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses the arguments as the command does, and stops there."""

    class Parsed(Exception):
        pass

    def parse(parser: argparse.ArgumentParser) -> None:
        parse_args(parser, arguments)
        raise Parsed

    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    monkeypatch.delitem(sys.modules, name, raising=False)
    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed):
        runpy.run_module(name)["main"]()


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable = re.fullmatch(r"([A-Z_]+)=.*", word)
        pattern = rf"^{variable[1]} \?=" if variable else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"make {word}"


def check_extras(text: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.findall(r"\w[\w-]*", " ".join(re.findall(r"\.\[([\w,-]+)\]", text)))) <= set(
        extras
    )


@pytest.mark.parametrize("page", PAGES)
def test_names_in_sentences_exist(page):
    text = BLOCK.sub("", PAGES[page])
    check_extras(PAGES[page])
    for target in re.findall(r"`make ([^`]*)`", text):
        check_make(target.split())
    for name in re.findall(r"`(?:python -m )?((?:tools|cope_jax)\.[\w.]+)\b[^`/]*`", text):
        assert "NAME" in name or pkgutil.resolve_name(name), name
    for name in re.findall(r"`cope-jax (\w+)\b[^`]*`", text):
        assert name in ("NAME", *command_file.command_names()), name
    # Not model.FIELD.
    fields = set(filter(str.islower, re.findall(r"`--(?:\w+_)?config\.([\w.]*\w)", text)))
    assert fields <= all_fields(), page
    for path in re.findall(
        r"`((?:cope_jax|docs|experiments|notebooks|tests|tools)/[\w/]+\.\w+)`", text
    ):
        assert "NAME" in path or (ROOT / path).exists(), path


@functools.cache
def all_fields() -> set[str]:
    """The paths of all fields of all configs."""
    return set().union(*map(fields_of, config_files.names()))


def fields_of(name: str) -> set[str]:
    """The paths of all fields of a config."""

    def walk(config: ConfigDict, path: str) -> Iterator[str]:
        for name in config:
            yield f"{path}{name}"
            if isinstance(config[name], ConfigDict):
                yield from walk(config[name], f"{path}{name}.")

    return set(walk(config_files.named(name), ""))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    missing = []
    for link, name in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", PAGES[page]):
        target = (ROOT / page).parent / link if link else ROOT / page
        if not target.exists() or (name and name not in anchors(target.read_text())):
            missing.append(f"{link}#{name}")
    assert not missing


def anchors(text: str) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_flags_has_the_flags_that_commands_share():
    for name in ("griffe", "mkdocs"):
        pytest.importorskip(name)
    page = "\n".join(runpy.run_path(str(ROOT / "docs" / "generate.py"))["flags"]())
    for module in COMMON:
        importlib.import_module(module)
        defined = flags.FLAGS.flags_by_module_dict()[module]
        assert defined, module
        for flag in defined:
            text = re.sub(r"^<.*?>: ", "", " ".join((flag.help or "").split()))
            assert re.search(rf"^\| `--{flag.name}` \|.*\| {re.escape(text)} \|$", page, re.M)


def test_the_site_has_no_page_for_code_of_the_folder_docs():
    block = re.search(r"^exclude_docs: \|\n((?:  .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)
    patterns = block[1].split()
    code = [path.name for path in ROOT.glob("docs/*.py")]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in code)
