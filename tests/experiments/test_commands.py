import json
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from cope_jax.training.metrics import read_metrics

pytestmark = pytest.mark.xdist_group("commands")  # what its fixtures train is shared


@pytest.fixture(scope="module")
def trained(start, config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("train") / "run"
    done = start("train", *flags(config, workdir)).wait()
    assert done.status == 0, done.err
    return workdir, done


def flags(config, workdir):
    return (
        f"--config={config}",
        "--config.encoding=cope",
        "--config.training.steps=8",
        "--seed=5",
        f"--workdir={workdir}",
    )


def records(path):
    return json.loads(path.read_text())["records"]


def test_train_writes_and_prints_the_errors(trained):
    workdir, done = trained
    measured = records(workdir / "result.json")
    assert {(r["encoding"], r["seed"], r["step"]) for r in measured} == {("cope", 5, 8)}
    assert {"in_distribution", "dense", "sparse", "blanks=3"} <= {r["split"] for r in measured}
    value = next(r["value"] for r in measured if (r["split"], r["metric"]) == ("dense", "token_error"))
    line = next(line for line in done.out.splitlines() if " dense " in line)
    assert f" {100 * value:.2f} " in line
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows if "split" not in row] == [2, 4, 6, 8]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "8"]
    assert list(workdir.glob("events.out.tfevents.*"))


def test_train_again_trains_nothing_and_measures_the_same(trained, start, config):
    workdir, done = trained
    before = (workdir / "result.json").read_bytes(), (workdir / "metrics.jsonl").read_bytes()
    again = start("train", *flags(config, workdir)).wait()
    assert (again.status, again.out) == (0, done.out)
    assert [r["value"] for r in records(workdir / "result.json")] == [
        r["value"] for r in json.loads(before[0])["records"]
    ]
    assert (workdir / "metrics.jsonl").read_bytes() == before[1]


def test_evaluate_measures_what_train_measured(trained, start):
    workdir, _ = trained
    done = start("evaluate", f"--model={workdir}").wait()
    assert done.status == 0, done.err
    ours, theirs = (
        {(r["split"], r["metric"]): r["value"] for r in records(workdir / name)}
        for name in ("evaluation.json", "result.json")
    )
    assert ours == theirs


def test_evaluate_takes_as_many_examples_as_asked_for(trained, start):
    workdir, _ = trained
    done = start("evaluate", f"--model={workdir}", "--examples=50").wait()
    assert done.status == 0, done.err
    errors = [
        50 * r["value"]
        for r in records(workdir / "evaluation.json")
        if r["metric"] == "sequence_error" and r["split"] == "dense"
    ]
    assert errors == [pytest.approx(round(errors[0]), abs=1e-9)]
    assert "dense" in done.out


def test_inspect_shows_the_trained_model(trained, start):
    workdir, _ = trained
    done = start("inspect", f"--model={workdir}").wait()
    assert done.status == 0, done.err
    assert done.out.startswith("selective_copy, cope, seed 5, step 8")
    assert sorted(path.name for path in (workdir / "maps").iterdir()) == ["attention.png", "gates.png", "positions.png"]


@pytest.mark.parametrize("name", ["train", "compare", "evaluate", "generate", "inspect"])
def test_help_says_what_the_command_does(name, start):
    done = start(name, "--help").wait()
    assert ("--workdir" in done.out) == (name in ("train", "compare"))  # old names are not shown
    assert f"python -m experiments.{name}" in done.out, done.out


def test_a_command_runs_as_a_module(tmp_path, config):
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", f"--workdir={tmp_path}", "--seed=-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("path", ["train", "analysis/inspect", "analysis/perplexity"])
def test_a_command_that_is_started_as_a_file_says_how_to_start_it(path, tmp_path):
    file = Path(experiments.__file__).parent / f"{path}.py"
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"run it as: python -m experiments.{file.stem}\n")
