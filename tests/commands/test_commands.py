import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import cope_jax as cj
from cope_jax import encodings, models, tasks
from cope_jax.cli import command_file, jobs, outputs, run
from cope_jax.errors import ConfigError
from cope_jax.runs.grid import claims
from cope_jax.runs.load import load
from cope_jax.training import config_files
from cope_jax.training.metrics import read_metrics
from tests.commands.commands import ROOT, Command, Surroundings

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
    value = next(
        r["value"] for r in measured if (r["split"], r["metric"]) == ("dense", "token_error")
    )
    title, heading, *lines, written, further = filter(str.strip, done.out.splitlines())
    assert title == "selective_copy, decoder, cope, 6 examples a split, seed 5"
    assert heading.split() == "split token error, % sequence error, % loss".split()
    cells = next(line for line in lines if "dense" in line).split()
    assert cells[:2] == ["dense", f"{100 * value:.1f}"] and re.fullmatch(r"\d\.\d\d", cells[-1])
    assert written == f"{workdir}: result.json, metrics.jsonl, TensorBoard"
    assert further == f"next: cope-jax inspect --model={workdir}"
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows if "split" not in row] == [2, 4, 6, 8]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "8"]
    assert list(workdir.glob("events.out.tfevents.*"))
    lines = done.err.splitlines()
    names = ["parameters", "devices", "batch", "model", "all"]
    start = lines.index(next(line for line in lines if line.startswith("parameters")))
    assert [line.split()[0] for line in lines[start : start + 5]] == names
    assert lines[start].split()[1:] == [f"{measured[0]['parameters']:,}"]
    assert lines[start + 4] == f"all parameters: {workdir / 'summary.txt'}"
    assert "embedding.embedding" in (workdir / "summary.txt").read_text()
    assert "embedding.embedding" not in done.out + done.err
    assert [line.partition(" dense ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}: sequence error in_distribution 100.0 %," for step in (4, 8)
    ]


def test_train_again_trains_nothing_and_measures_the_same(trained, start, config):
    workdir, done = trained
    before = (workdir / "result.json").read_bytes(), (workdir / "metrics.jsonl").read_bytes()
    again = start("train", *flags(config, workdir)).wait()
    assert (again.status, again.out) == (0, done.out)
    assert (
        again.err.splitlines()[-1] == "decoder, cope: has all 8 steps"
        and "parameters" not in again.err
    )
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
    assert done.out.splitlines()[0] == "selective_copy, decoder, cope, 6 examples a split, seed 5"
    assert done.out.splitlines()[-2:] == [
        f"{workdir}: evaluation.json",
        f"next: cope-jax inspect --model={workdir}",
    ]


@pytest.mark.slow
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


@pytest.mark.slow
def test_inspect_shows_the_trained_model(trained, start):
    workdir, _ = trained
    done = start("inspect", f"--model={workdir}").wait()
    assert done.status == 0, done.err
    assert done.out.startswith("selective_copy, cope, seed 5, step 8")
    names = sorted(path.stem for path in (workdir / "maps").glob("*.png"))
    assert names == ["attention", "gates", "positions", "query"]


@pytest.mark.parametrize("name", ["train", "compare", "evaluate", "export", "generate", "inspect"])
def test_help_says_what_the_command_does(name, start):
    done = start(name, "--help").wait()
    assert (done.status, done.err) == (0, "")
    assert ("--workdir" in done.out) == (name in ("train", "compare"))  # old names are not shown
    assert f"cope-jax {name}" in done.out, done.out
    assert str(ROOT) not in done.out and "(default: 'None')" not in done.out
    assert not re.search("None means|repeat this option|;\\n", done.out)
    kinds = "commands, configs, grids, encodings, tasks, models and trained models"
    assert done.out.endswith(f"cope-jax list shows all {kinds}.\n")


def test_every_command_that_reads_runs_takes_encodings_of_files():
    texts = {path.stem: path.read_text() for path in ROOT.glob("cope_jax/commands/*.py")}
    reading = {
        n for n, text in texts.items() if re.search(r"DEFINE_model|DEFINE_list\(\s*\"models", text)
    }
    assert len(reading) == 11
    assert {name for name in reading if "DEFINE_encoding()" not in texts[name]} == set()


def test_help_needs_no_wide_terminal(start):
    done = start("convert", "--help", around=Surroundings(variables={"COLUMNS": "1"})).wait()
    assert (done.status, done.err) == (0, "")


def test_help_lists_the_fields_of_a_config(start):
    done = start("train", "--help", "--config=quick").wait()
    assert done.status == 0 and "\nFields of quick:\n" in done.out
    assert (
        "\n  --config.training.steps=600\n" in done.out
        and "\n  --config.model.block.num_heads=8\n" in done.out
    )
    assert (
        start("train", "--config=quikc", "--help")
        .wait()
        .error.startswith("unknown config 'quikc': did you mean")
    )


def test_list_shows_every_name_with_a_line(start):
    done = start("list").wait()
    assert (done.status, done.err) == (0, "")
    blocks = {
        block.splitlines()[0]: [line.split() for line in re.split(r"\n  (?=\S)", block)[1:]]
        for block in done.out.split("\n\n")
    }
    assert all(len(words) > 3 for lines in blocks.values() for words in lines)
    names = {kind: tuple(words[0] for words in lines) for kind, lines in blocks.items()}
    assert (
        names["configs"] == tuple(config_files.families())
        and names["encodings"] == encodings.names()
    )
    for name, *words in blocks["configs"]:
        variants = config_files.variants_of(name)
        assert not variants or " ".join(words).endswith(f"variants: {', '.join(variants)}")
    assert "counting" in names["configs"] and config_files.variants_of("counting")[0] == "1"
    assert (names["tasks"], names["models"]) == (tasks.TASKS.names(), models.MODELS.names())
    assert names["commands"] == command_file.command_names()
    titles = {name: load(name).title() for name in ("counting", "shakespeare")}
    assert {name: " ".join(words) for name, *words in blocks["trained"]} == titles
    assert (
        start("list", "--only=trained").wait().out == f"trained{done.out.rpartition('trained')[2]}"
    )


def test_a_reader_that_has_seen_enough_is_no_defect():
    command = [sys.executable, "-m", "cope_jax", "list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


@pytest.mark.parametrize(
    "command, status",
    [
        ("list >&- 2>&-", 0),
        ("train --config=no_such --workdir=x 2>&-", 2),
        ("train --config=no_such --workdir=x >/dev/full 2>/dev/full", 2),
        ("list --only=tasks >/dev/full", 4),
    ],
)
def test_closed_and_full_streams_change_no_status(command, status):
    if "full" in command and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"{sys.executable} -m cope_jax {command}"
    assert subprocess.run(line, shell=True, cwd=ROOT, env=buffered).returncode == status


@pytest.mark.parametrize(
    ("encoding", "name", "given"),
    [
        ("latin-1", "list", []),
        pytest.param(
            *("euc_jp", "inspect", ["--model=counting", "--input=a = 0 ; pass; a ++; print a"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stdout_that_lacks_characters_is_enough(encoding, name, given, tmp_path):
    folder = [f"--out={tmp_path}"] if "inspect" in name else []
    done = Command(
        tmp_path / "compiled", name, *given, *folder, around=Surroundings(encoding=encoding)
    ).wait()
    assert (done.status, done.err) == (0, "") and len(done.out) > 100 and "?" in done.out


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_without_a_name_the_commands_are_listed(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cope-jax", *words])
    with pytest.raises(SystemExit) as left:
        run.run_command()
    listed = capsys.readouterr().out.split("\n\n")[1]
    assert not left.value.code and tuple(listed.split(", ")) == command_file.command_names()


def test_an_unknown_command_is_one_line(start):
    done = start("trian", "--config=quick").wait()
    assert done.status == 2 and done.error.startswith(
        "unknown command 'trian': did you mean 'train'? Choose from "
    )


@pytest.mark.parametrize(
    ("started", "program"),
    [
        (["python", ".venv/bin/cope-jax", "train"], ".venv/bin/cope-jax"),
        (["python", "{folder}/cope-jax", "train"], "cope-jax"),
        (["python", "-m", "cope_jax", "train"], "python -m cope_jax"),
        (["python", "-m", "pytest"], "cope-jax"),
        (["ipython"], "cope-jax"),
    ],
)
def test_the_next_command_starts_the_same_program(started, program, tmp_path, monkeypatch, capsys):
    (tmp_path / "cope-jax").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [word.format(folder=tmp_path) for word in started]
    monkeypatch.setattr(sys, "orig_argv", words)
    outputs.name_next("runs/x", cj.config("quick"))
    assert capsys.readouterr().out == f"next: {program} inspect --model=runs/x\n"


def test_the_number_of_jobs(monkeypatch):
    def number(value, cells=9, **options):
        monkeypatch.setattr(jobs, "_JOBS", SimpleNamespace(value=value))
        return jobs.number(cells, **options)

    monkeypatch.setattr(claims, "cores", lambda: 4)
    assert [number(None), number(None, cells=3), number(None, default=1), number(7)] == [4, 3, 1, 7]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [number(None), number(1)] == [1, 1]
    with pytest.raises(ConfigError, match="--jobs=2 is only for one process on a CPU: omit --jobs"):
        number(2)


def test_the_word_after_a_flag_without_a_value_is_another_flag(monkeypatch):
    known = run.flags.FlagValues()
    run.flags.DEFINE_boolean("only_failed", False, "", flag_values=known)
    run.flags.DEFINE_integer("seeds", 1, "", flag_values=known)
    run.flags.DEFINE_string("workdir", None, "", flag_values=known)
    monkeypatch.setattr(run.flags, "FLAGS", known)
    words = ["sweep", "--only_failed", "--workdir=runs/2_layers"]
    known([*words, "--seeds=2"])
    run._check_numbers(words)
    with pytest.raises(
        ConfigError, match="--seeds needs plain decimals, such as 1000 and 1e-3, not 1_0"
    ):
        run._check_numbers([*words, "--seeds", "1_0"])


@pytest.mark.parametrize(
    "soft, hard, expected", [(40, 40, None), (40, 4096, 256), (40, -1, 256), (1024, 4096, 1024)]
)
def test_a_low_limit_of_open_files_is_raised_or_one_line(soft, hard, expected, monkeypatch):
    limits = [(soft, hard)]
    monkeypatch.setattr(run.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(run.resource, "setrlimit", lambda kind, pair: limits.append(pair))
    if expected is None:
        with pytest.raises(
            ConfigError,
            match=r"^only 40 files may be open at a time: allow at least 256 with `ulimit -n`$",
        ):
            run._allow_open_files()
    else:
        run._allow_open_files()
        assert limits[-1] == (expected, hard)
