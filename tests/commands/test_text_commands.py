"""Text from runs on text, and what their heads count, by command."""

import csv
import json
import os
import re
import runpy
import subprocess
import sys

import pytest

from cope_jax.tokenizers.byte_level import Bytes
from tests.commands.commands import ROOT
from tests.commands.pretrained import write_model

pytestmark = pytest.mark.xdist_group("text_commands")

MODEL = {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 2, "mlp_dim": 16}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on the built-in sample in bytes, and one in words with a table of positions."""
    folder = tmp_path_factory.mktemp("text_commands")
    for kind, encoding in (("bytes", "cope(npos_max=8)"), ("words", "learned")):
        write_model(folder / kind, "text", {"tokenizer": kind, "length": 32}, MODEL, encoding)
    return folder


def generate(start, run, *flags):
    done = start("generate", f"--model={run}", *flags).wait()
    assert done.status == 0, done.err
    return done


def written(start, run, folder, *flags):
    """The continuations, letter by letter: a terminal may show the ends of lines otherwise."""
    (folder / "out.jsonl").unlink(missing_ok=True)
    done = generate(start, run, *flags, f"--out={folder / 'out.jsonl'}")
    assert done.out == f"{folder / 'out.jsonl'}\n"
    lines = (folder / "out.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def test_a_prompt_is_continued_beyond_the_length_of_training(start, runs):
    done = generate(start, runs / "bytes", "--prompt=Zwölf", "--max_new_tokens=60", "--top_k=5")
    assert done.out.startswith("Zwölf") and len(done.out) > len("Zwölf\n")
    assert ", seed 0, step 2\n" in done.err
    assert "the context has up to 66 tokens; training used 32" in done.err
    assert re.search(
        r"^60 tokens, [\d,]+ tokens/s \(excluding compilation\)$", done.err, re.MULTILINE
    )


@pytest.mark.slow
def test_the_seed_decides_and_a_stop_text_ends(start, runs, tmp_path):
    flags = ("--prompt=Zwölf", "--max_new_tokens=60", "--top_k=5")
    (row,) = written(start, runs / "bytes", tmp_path, *flags)
    assert row["prompt"] == "Zwölf" and len(row["continuation"]) > 6
    stop = row["continuation"][4:6]
    (stopped,) = written(start, runs / "bytes", tmp_path, *flags, f"--stop={stop}")
    assert stopped["continuation"] == row["continuation"][: row["continuation"].index(stop)]
    (other,) = written(start, runs / "bytes", tmp_path, *flags, "--sample_seed=1")
    assert other["continuation"] != row["continuation"]


@pytest.mark.slow
def test_a_stop_text_ends_the_draws_and_its_beginning_alone_does_not(start, runs, tmp_path):
    flags = ("--prompt=The lamp", "--max_new_tokens=20")
    (row,) = written(start, runs / "words", tmp_path, *flags)
    (whole,) = written(
        start, runs / "words", tmp_path, *flags, f"--stop={row['continuation'][-1]}xyzzy"
    )
    assert whole == row
    done = generate(start, runs / "words", *flags, f"--stop={row['continuation'][0]}")
    assert re.search(r"^1 tokens$", done.err, re.MULTILINE), done.err


@pytest.mark.slow
def test_a_file_of_prompts_becomes_one_of_continuations(start, runs, tmp_path):
    (tmp_path / "prompts.txt").write_text("The lamp\nA\nIt was\n")
    flags = (
        f"--prompts={tmp_path / 'prompts.txt'}",
        "--max_new_tokens=6",
        "--temperature=0",
        "--batch_size=2",
    )
    rows = written(start, runs / "bytes", tmp_path, *flags)
    assert [row["prompt"] for row in rows] == ["The lamp", "A", "It was"]
    shown = "\n".join(f"{row['prompt']}{row['continuation']}\n" for row in rows)
    assert generate(start, runs / "bytes", *flags).out == shown.replace("\r\n", "\n").replace(
        "\r", "\n"
    )


@pytest.mark.slow
def test_the_size_of_a_batch_changes_no_draw(start, runs, tmp_path):
    (tmp_path / "prompts.txt").write_text("The lamp\nA\r\nThe lamp\nIt was\n", newline="")
    flags = (f"--prompts={tmp_path / 'prompts.txt'}", "--max_new_tokens=20", "--sample_seed=3")
    single, three = (
        written(start, runs / "bytes", tmp_path, *flags, f"--batch_size={size}") for size in (1, 3)
    )
    assert single == three and [row["prompt"] for row in single] == [
        "The lamp",
        "A",
        "The lamp",
        "It was",
    ]
    assert single[0]["continuation"] != single[2]["continuation"], (
        "each prompt has draws of its own"
    )


def test_an_empty_line_of_a_file_is_named(start, runs, tmp_path):
    (tmp_path / "prompts.txt").write_text("The\n\nA\n")
    done = start(
        "generate", f"--model={runs / 'bytes'}", f"--prompts={tmp_path / 'prompts.txt'}"
    ).wait()
    assert (done.status, "prompts.txt, line 2, is empty" in done.error) == (2, True), done.err


MISTAKES = {
    "no prompt": (
        [],
        "exactly one of --prompt and --prompts is required: give a text in --prompt, or a file",
    ),
    "two": (["--prompt=a", "--prompts=b"], "exactly one of --prompt and --prompts is required"),
    "empty": (["--prompt="], "--prompt is empty: write the beginning of a text"),
    "no file": (["--prompts=nowhere.txt"], "cannot read nowhere.txt"),
    "unknown word": (
        ["--prompt=The xyzzy"],
        "--prompt has the unknown word 'xyzzy': write words of the vocabulary",
    ),
    "too long": (
        ["--prompt=The lighthouse", "--max_new_tokens=31"],
        "a prompt of 3 tokens with 31 new tokens is too long, because position 32 is outside of the learned table",
    ),
    "temperature": (
        ["--prompt=The", "--temperature=-1"],
        "flag --temperature=-1: -1.0 is not a non-negative number",
    ),
    "stop": (["--prompt=The", "--stop="], "--stop is empty"),
    "seed": (["--prompt=The", "--seed=7"], "holds no seed 7: choose from 0"),
    "no prompts": (["--prompts=/dev/null"], "/dev/null is empty: write one prompt per line"),
    "batch": (
        ["--prompt=The", "--batch_size=0"],
        "flag --batch_size=0: 0 is not a positive integer",
    ),
    "out": (
        ["--prompt=The", "--out=nowhere/out"],
        "cannot write to nowhere/out (No such file or directory): choose",
    ),
    "file": (
        ["--prompt=The", f"--out={__file__}"],
        f"{__file__} exists: delete it, or choose another --out",
    ),
    "folder": (
        ["--prompt=The", "--out=."],
        "cannot write to . (Is a directory): choose another --out",
    ),
}


@pytest.mark.parametrize("flags, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line(start, runs, flags, message):
    done = start("generate", f"--model={runs / 'words'}", *flags).wait()
    assert (done.status, message in done.error) == (2, True), done.err


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--temperature=nan", "--temperature must be a finite number, got nan"),
        ("--top_p=0", "--top_p must be above 0, got 0.0"),
        ("--out=nowhere/out", "cannot write to nowhere/out"),
    ],
)
def test_flags_are_checked_before_the_model_is_read(start, flag, message):
    done = start("generate", "--model=no_such_model", "--prompt=The", flag).wait()
    assert (done.status, message in done.error) == (2, True), done.err


def test_a_command_that_fails_leaves_no_file(start, tmp_path):
    out = tmp_path / "out"
    done = start("generate", "--model=no_such_model", "--prompt=The", f"--out={out}").wait()
    assert done.status == 2 and "there is no folder no_such_model" in done.error
    assert not out.exists()


@pytest.mark.slow
def test_control_characters_do_not_reach_a_terminal(runs):
    """Others get the text as it is."""
    command = [
        sys.executable,
        "-m",
        "cope_jax",
        "generate",
        f"--model={runs / 'bytes'}",
        "--max_new_tokens=1",
    ]
    screen, terminal = os.openpty()
    command.append("--prompt=A\x1b]0;title\x07B")
    done = subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    assert done.returncode == 0, done.stderr
    assert b"A\\x1b]0;title\\x07B" in os.read(screen, 1000)
    os.close(terminal)
    os.close(screen)
    assert (
        "A\x1b]0;title\x07B"
        in subprocess.run(command, capture_output=True, cwd=ROOT, text=True).stdout
    )


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_and_a_terminal_without_letters_are_no_defects(runs):
    command = [
        sys.executable,
        "-m",
        "cope_jax",
        "generate",
        f"--model={runs / 'bytes'}",
        "--prompt=Zwölf",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, cwd=ROOT) as process:
        assert process.stdout.read(5) == b"Zw?lf"
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 141 and "Traceback" not in err and "BrokenPipe" not in err, err


def test_an_exported_model_goes_on_alike(start, runs, tmp_path):
    done = start("convert", f"--model={runs / 'words'}", f"--out={tmp_path / 'own'}").wait()
    assert done.status == 0, done.err
    options = runpy.run_path(str(tmp_path / "own" / "train.py"))["get_config"]().task.options
    assert (options["vocab"], options["vocab_size"]) == (str(tmp_path / "own" / "words.txt"), None)
    flags = ("--prompt=The lamp", "--max_new_tokens=8")
    assert (
        generate(start, tmp_path / "own", *flags).out == generate(start, runs / "words", *flags).out
    )
    (tmp_path / "own" / "words.txt").unlink()
    done = start("generate", f"--model={tmp_path / 'own'}", "--prompt=The").wait()
    assert (done.status, "tokenizer" in done.error) == (2, True), done.err


def test_rows_of_a_model_beyond_its_tokenizer_are_not_drawn(start, tmp_path):
    options = {"tokenizer": "bpe", "vocab_size": 600, "length": 32}
    model = {**MODEL, "tie_embeddings": True}
    write_model(tmp_path / "bpe", "text", options, model, "learned")
    flags = (f"--model={tmp_path / 'bpe'}", f"--out={tmp_path / 'own'}", "--format=gpt2")
    done = start("convert", *flags).wait()
    assert done.status == 0, done.err
    (tmp_path / "own" / "tokenizer.json").write_text(Bytes().text)
    flags = ("--prompt=The", "--max_new_tokens=28", "--temperature=9")
    assert generate(start, tmp_path / "own", *flags).out.startswith("The")


def test_inspect_ranks_heads_and_says_what_it_sees(start, runs, tmp_path):
    done = start(
        "inspect", f"--model={runs / 'bytes'}", "--windows=4", "--top=1", f"--out={tmp_path}"
    ).wait()
    assert done.status == 0, done.err
    assert re.search(
        r"^The gates of \d of 2 heads follow a feature of the text", done.out, re.MULTILINE
    )
    # A pipe has no colours, so the gates are below the text.
    shown = re.findall(
        r"^layer 0, head \d: mean gates\n.+\n(?:\d\.\d\d +)+$", done.out, re.MULTILINE
    )
    assert len(shown) == 1
    rows = list(csv.DictReader((tmp_path / "heads.csv").read_text().splitlines()))
    assert sorted((row["layer"], row["head"]) for row in rows) == [("0", "0"), ("0", "1")]
    values = [float(row["auc"]) for row in rows]
    assert values == sorted(values, reverse=True) and values[0] == float(
        rows[0][f"auc {rows[0]['best']}"]
    )
    assert all(float(row["low"]) <= float(row["auc"]) <= float(row["high"]) for row in rows)
    assert ", seed 0, step 2\n" in done.out and re.search(
        r"^12\d tokens in 4 windows of 32$", done.out, re.MULTILINE
    )
    assert (tmp_path / "features.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_inspect_takes_a_text(start, runs, tmp_path):
    text = "The lamp is bright. The sea is calm.\nIt was 1850."
    done = start(
        "inspect", f"--model={runs / 'bytes'}", f"--input={text}", "--head=1", f"--out={tmp_path}"
    ).wait()
    assert done.status == 0, done.err
    assert (
        f"{len(text)} tokens in 1 window of " in done.out
        and "layer 0, head 1: mean gates" in done.out
    )
    rows = done.out.split("mean gates\n")[1].splitlines()
    pairs = zip(rows[::2], rows[1::2], strict=False)
    shown = [row for row, below in pairs if re.match(r"\d\.\d\d ", below)]
    unbroken = "".join("".join(shown).split())
    assert unbroken == "".join(f"<|endoftext|>{text}".replace("\n", "↵").split())


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        ("words", [], "the encoding of this model has no gates"),
        ("bytes", ["--input=short"], "--input has 6 tokens: give at least 16"),
        ("bytes", ["--split=best"], "unknown split of text 'best'"),
        ("bytes", ["--seed=7"], "holds no seed 7: choose from 0"),
        pytest.param(
            *("bytes", ["--input=It was late. It was dark.", "--out=/proc/maps"]),
            "cannot write to /proc/maps (",
            marks=pytest.mark.slow,
        ),
        ("bytes", ["--head=2"], "head must be between 0 and 1, got 2"),
        ("bytes", ["--layer=1"], "layer must be between 0 and 0, got 1"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(start, runs, run, flags, message):
    done = start("inspect", f"--model={runs / run}", *flags).wait()
    assert (done.status, message in done.error) == (2, True), done.err
