"""The perplexity of runs on the built-in sample, as `compare` shows it and as the command measures
it.
"""

import json
import os
import shutil
import signal

import pytest

from cope_jax.runs.workdir import MEASURING, Workdir
from tests.commands.pretrained import TEXT_CONFIG, write_model

pytestmark = pytest.mark.xdist_group("perplexity_command")


def read(path):
    return json.loads(path.read_text())


OPTIONS = {"vocab_size": 300, "length": 8, "sweep": (8, 16, 32)}
MODEL = {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two seeds side by side."""
    folder = tmp_path_factory.mktemp("perplexity") / "run"
    write_model(folder, "text", OPTIONS, MODEL, "learned", seeds=(0, 1))
    return folder


@pytest.mark.slow
def test_perplexity_is_the_headline_of_a_comparison(start, tmp_path):
    path, compared = tmp_path / "config.py", tmp_path / "run"
    path.write_text(TEXT_CONFIG.format(task="text", options=OPTIONS, model=MODEL, encoding="cope"))
    flags = ("--encodings=learned", "--seeds=2", "--config.seeds_side_by_side=2")
    sizes = ("--config.evaluation.examples=1000", "--config.evaluation.sweep_examples=1000")
    done = start("compare", f"--config={path}", *flags, *sizes, f"--workdir={compared}").wait()
    assert done.status == 0, done.err
    assert (compared / "table.md").read_text().startswith("**text**, perplexity, lower is better.")
    assert "**text**, bits per byte" in (compared / "table.md").read_text()
    assert (compared / "perplexity_by_length.png").exists()
    records = read(compared / "results.json")["records"]
    assert {r["split"] for r in records if r["metric"] == "perplexity"} == {
        "validation",
        "test",
        "length=8",
        "length=16",
        "length=32",
    }
    rows = (
        line
        for path in compared.glob("cells/**/metrics.jsonl")
        for line in path.read_text().splitlines()
    )
    assert any("perplexity" in json.loads(row) for row in rows)


@pytest.mark.slow
def test_windows_of_the_run_give_its_figures(run, start):
    for command, *flags in (["evaluate", "--examples=1000"], ["perplexity", "--lengths=16,8"]):
        stride = ["--stride=8"] * (command == "perplexity")
        done = start(command, f"--model={run}", *flags, *stride).wait()
        assert done.status == 0, done.err
    ours = [r for r in read(run / "perplexity.json")["records"] if r["length"] == 8]
    assert [row["seed"] for row in ours] == [0, 1]
    theirs = read(run / "evaluation.json")["records"]
    for row in ours:
        for metric in ("loss", "perplexity", "token_perplexity", "bits_per_byte"):
            (value,) = [
                r["value"]
                for r in theirs
                if (r["seed"], r["split"], r["metric"]) == (row["seed"], "test", metric)
            ]
            assert row[metric] == pytest.approx(value, rel=1e-4), metric
    assert (run / "loss_by_position.png").exists() and (run / "perplexity_by_length.png").exists()
    assert "windows of 8" in done.out

    # What is measured is kept; another split is added.
    before = read(run / "perplexity.json")["records"]
    path = run / "perplexity.json"
    before[0]["loss"] = 1.25
    path.write_text(json.dumps({"records": before}))
    done = start("perplexity", f"--model={run}", "--stride=8").wait()
    assert done.status == 0, done.err
    assert read(path)["records"] == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--split=dev"], "unknown --split 'dev'", marks=pytest.mark.slow),
        (
            ["--stride=9"],
            "--stride=9 skips tokens between windows of 8 tokens: give a smaller stride",
        ),
        (["--lengths=8,x"], "--lengths takes positive whole numbers separated by commas, not 'x'"),
        (
            ["--lengths=64"],
            "windows of 64 tokens are too long, because position 63 is outside of the learned table",
        ),
    ],
)
def test_wrong_input_is_one_line(flags, message, run, start):
    before = contents(run)
    done = start("perplexity", f"--model={run}", *flags).wait()
    assert done.status == 2
    assert message in done.error
    assert contents(run) == before, "all lengths are looked at before any is measured"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*.*")}


@pytest.mark.parametrize("command", ["evaluate", "perplexity"])
def test_one_command_at_a_time_writes_into_a_run_and_says_so_before_it_measures(
    command, run, start, tmp_path
):
    run = shutil.copytree(run, tmp_path / "run")
    before = contents(run)
    with Workdir(run).locked(MEASURING):
        done = start(command, f"--model={run}").wait()
    assert (done.status, f"{run} is in use by process {os.getpid()} on" in done.error) == (
        2,
        True,
    ), done.err
    (run / MEASURING).unlink()
    (run / MEASURING).mkdir()  # nobody can write there, not even root
    done = start(command, f"--model={run}").wait()
    assert (done.status, f"cannot write to {run} (Is a directory)" in done.error) == (2, True), (
        done.err
    )
    assert contents(run) == before


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(run, start, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    path = run / "perplexity.json"
    path.unlink(missing_ok=True)
    flags = (f"--model={run}", "--split=train", "--lengths=1,2,3,4,5,6,7,8")
    command = start("perplexity", *flags)
    command.signal_when(path.exists, signal.SIGINT)
    done = command.wait()
    line = "interrupted; rerun the same command to resume"
    assert (done.status, done.out) == (130, ""), done.err
    assert done.err.splitlines()[-1].endswith(line) and "Traceback" not in done.err
    kept = read(path)["records"]
    assert 0 < len(kept) < 16
    kept[0]["loss"] = 1.25  # shows that it is not measured again
    path.write_text(json.dumps({"records": kept}))
    done = start("perplexity", *flags).wait()
    assert done.status == 0, done.err
    records = read(path)["records"]
    assert records[: len(kept)] == kept
    assert [(row["length"], row["seed"]) for row in records] == [
        (size, seed) for size in range(1, 9) for seed in (0, 1)
    ]
    assert not list(run.glob("*.partial"))
