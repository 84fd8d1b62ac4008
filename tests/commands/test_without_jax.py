"""Help, lists and mistyped flags need no JAX, whose import takes half a second of CPU."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import cope_jax
from cope_jax.cli.command_file import COMMANDS, command_names
from tests.commands.commands import ROOT

CHILDREN = """
import json, os, sys
from cope_jax.__main__ import main
from cope_jax.cli import run  # once, for all children
out = os.dup(1)  # a command closes its own
for words in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    sys.argv = ["cope-jax", *words]
    try:
        main()
    except SystemExit as left:
        heavy = sorted({"jax", "flax", "orbax"} & sys.modules.keys())
        os.write(out, f"\\0{json.dumps([left.code or 0, heavy])}\\0".encode())
        os._exit(0)
"""
"""Runs each command in a child; prints its output, then how it ended and what it imported."""
PLAIN = [["--help"], ["help"], ["help", "train"], ["--version"], ["list"]]
HELP = [[name, "--help"] for name in command_names()]
MISTAKES = {
    "trian --config=quick": "unknown command 'trian': did you mean 'train'? Choose from ",
    "train --confg=quick": "unknown flag --confg: did you mean --config? See --help",
    "train --config=quick --config.seed=1 --noworkdir=x": "unknown flag --noworkdir",
    "compare --config quick --seedz 3": "unknown flag --seedz: did you mean --seeds? See --help",
    "train --config=quikc --workdir=x": "unknown config 'quikc': did you mean 'quick'? Choose from ",
    "train config=quick": "unexpected argument 'config=quick': write --config=quick\n",
    "train --config=quick config.seed=1": "unexpected argument 'config.seed=1': write --config.s",
    "train --config.training.steps 5 more": "unexpected argument 'more': give all options as flags",
    "train quick --config.training.steps=5": "unexpected argument 'quick': give all options as",
    "sweep --dry-run": "unknown flag --dry-run: did you mean --dry_run? See --help",
    "train --confg.training.steps=5": "unknown flag --confg.training.steps: did you mean --config.tr",
    "evaluate": "missing --model; see --help",
    "list --only=encoding": "unknown --only 'encoding': did you mean 'encodings'? Choose from ",
    "sweep --xyz": "unknown flag --xyz; see --help",
}


@pytest.fixture(scope="module")
def answers():
    asked = [*PLAIN, *HELP, *(words.split() for words in MISTAKES)]
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        check=True,
    )
    texts = done.stdout.split("\0")
    ends = map(json.loads, texts[1::2])
    known = zip(asked, texts[::2], ends, strict=False)  # a last text, which is empty
    return {" ".join(words): (text, *end) for words, text, end in known}


def test_no_answer_imports_jax(answers):
    assert len(answers) == len(PLAIN) + len(HELP) + len(MISTAKES)
    assert {words: heavy for words, (_, _, heavy) in answers.items() if heavy} == {}


def test_list_leaves_out_what_the_package_does_not_import(tmp_path):
    copy = shutil.copytree(ROOT / "cope_jax", tmp_path / "cope_jax")
    file = copy / "encodings" / "mine.py"
    file.write_text('@ENCODINGS.register("mine")\nclass Mine(Encoding):\n    """Mine."""\n')
    for line, listed in (("", False), ("from cope_jax.encodings import mine as mine\n", True)):
        with (copy / "encodings" / "__init__.py").open("a") as package:
            package.write(line)
        command = [sys.executable, "-m", "cope_jax", "list", "--only=encodings"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ("\n  mine " in done.stdout, "\n  rope " in done.stdout) == (listed, True)


def test_help_is_the_docstring_and_the_flags(answers):
    for words in HELP:
        text, status, _ = answers[" ".join(words)]
        assert status == 0 and "\n\nFlags:\n" in text, words
        document = (COMMANDS / f"{words[0]}.py").read_text().partition('"""')[2]
        assert text.partition("\n")[0] == document.partition("\n")[0]


@pytest.mark.parametrize("name", command_names())
def test_examples_in_help_can_be_pasted(name, answers):
    _, examples, *_ = answers[f"{name} --help"][0].split("\n\n")
    for line in examples.replace("\\\n", "").splitlines():
        program, command, *flags = shlex.split(line)
        assert (program, command) == ("cope-jax", name), line
        assert all(flag.startswith("--") for flag in flags), line


@pytest.mark.parametrize("name", ["evaluate", "harness", "inspect", "perplexity"])
def test_help_says_what_is_written_about_a_model_of_the_package(name, answers):
    text = " ".join(answers[f"{name} --help"][0].split())
    assert "name of a trained model of the package, such as" in text
    assert re.search(
        r"the run's folder or, for a trained model of the package, in(to)? runs/", text
    )


def test_version_and_help_are_no_unknown_commands(answers):
    assert answers["--version"][:2] == (f"cope-jax {cope_jax.__version__}\n", 0)
    assert answers["help"] == answers["--help"] and answers["help"][1] == 0
    assert answers["help train"] == answers["train --help"]


def test_mistakes_are_one_line(answers):
    for words, line in MISTAKES.items():
        text, status, _ = answers[words]
        assert (status, text.count("\n")) == (2, 1), text
        assert text.startswith(f"error: {line}")
