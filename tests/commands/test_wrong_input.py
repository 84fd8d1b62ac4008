import json
import os
import shutil
from pathlib import Path

import pytest

from tests.commands.commands import RARE

QUICK = "cope_jax/configs/quick.py"

pytestmark = pytest.mark.xdist_group("compare")  # what `straight` trains is shared


@pytest.fixture
def workdir(straight, tmp_path):
    """A copy of a comparison, to be damaged."""
    return Path(shutil.copytree(straight[0], tmp_path / "run"))


def contents(folder):
    """The contents of a folder, except the lock, which names the last holder."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("compare", ["--config=quikc"], "unknown config 'quikc': did you mean 'quick'?"),
        (
            "compare",
            ["--encodings=cope,ropee"],
            "unknown encoding 'ropee': did you mean 'rope'? Choose from alibi, ",
        ),
        ("compare", ["--encodings="], "cannot read the encoding ''"),
        ("compare", ["--encodings=rope,cope,rope"], "--encodings names 'rope' twice"),
        (
            "compare",
            ["--encodings=cope(gates=value)"],
            "unknown option of cope 'gates': did you mean 'gate'?",
        ),
        ("compare", ["--config.encodings.cope.p_max=3"], "p_max"),
        (
            "compare",
            ["--config.task.name=flip_flap"],
            "unknown task 'flip_flap': did you mean 'flip_flop'?",
        ),
        ("compare", ["--config.task.options.num_token=3"], "num_token"),
        ("compare", ["--config.trainin.steps=3"], "did you mean 'training'?"),
        ("compare", ["--steps=3"], "unknown flag --steps: did you mean --config.training.steps?"),
        ("train", ["--training.steps=3"], ".steps: did you mean --config.training.steps? See"),
        (
            "compare",
            ["--config.training.steps=abc"],
            "--config.training.steps=abc: the value must be a whole number",
        ),
        ("compare", ["--config.training.steps=15"], "training.steps=15 must be a multiple of"),
        (
            "compare",
            ["--config.model.block.dropout=high"],
            "--config.model.block.dropout=high: the value must be a",
        ),
        ("compare", ["--seeds=0"], "--seeds=0"),
        (
            "compare",
            ["--encodings=cope\udcff"],
            r"--encodings=cope\udcff is not UTF-8: rename the file or folder",
        ),
        (
            "compare",
            ["--seeds=1_000"],
            "--seeds needs plain decimals, such as 1000 and 1e-3, not 1_000",
        ),
        (
            "compare",
            ["--seeds", "0x10"],
            "--seeds needs plain decimals, such as 1000 and 1e-3, not 0x10",
        ),
        (
            "compare",
            ["--config.training.steps=1_6"],
            "--config.training.steps needs plain decimals",
        ),
        (
            "compare",
            ["--encodings=cope(npos_max=0x10)"],
            "npos_max in the encoding 'cope(npos_max=0x10)' needs plain",
        ),
        ("compare", ["--seed=0"], "unknown flag --seed: did you mean --seeds? See --help"),
        (
            "compare",
            ["more"],
            "unexpected argument 'more': give all options as flags, names of a list with",
        ),
        (
            "compare",
            ["--config.training.examples=10", "--config.training.data_dir=nowhere"],
            "nowhere",
        ),
        (
            "train",
            ["--config.encoding=learned", "--config.encodings.learned.max_length=20"],
            "max_length",
        ),
        (
            "train",
            ["--config.job.mesh.data=16"],
            "job.mesh data=16 × fsdp=1 × tensor=1 × sequence=1 asks for 16 devices",
        ),
        ("compare", ["--config.encodings.fire.c=inf"], "c must be finite, got inf"),
        ("train", ["--config.job.mesh.fsdp=-1"], "job.mesh may set only one axis to -1"),
        ("train", ["--profile_steps=9:3"], "cannot profile the steps '9:3': write FIRST:LAST"),
        ("train", ["--profile_steps=2000:2010"], "--profile_steps=2000:2010 is not before step"),
        (
            "train",
            ["--coordinator=localhost", "--num_processes=2", "--process_id=0"],
            "--coordinator=localhost must be HOST:PORT",
        ),
        (
            "train",
            ["--coordinator=localhost:65536", "--num_processes=2", "--process_id=0"],
            "--coordinator=localhost:65536 must be HOST:PORT with a port below 65536, such as",
        ),
        (
            "train",
            ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
            "--process_id=2 must be less than --num_processes=2",
        ),
        ("train", ["--seed=2147483648"], "--seed=2147483648"),
        ("train", ["--seed=x"], "--seed=x: the value must be a whole number"),
        (
            "train",
            ["--config.task.name=flip_flop"],
            "=flip_flop is not possible, because quick.py fixes the task: choose another --config, such as flip_flop",
        ),
        (
            "compare",
            ["--config.model.name=rnn_lm"],
            "=rnn_lm is not possible, because quick.py fixes the model: choose another --config, such as ",
        ),
        (
            "train",
            ["more"],
            "unexpected argument 'more': give all options as flags, names of a list with",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_line_and_leaves_nothing_behind(
    command, flags, message, start, tmp_path
):
    workdir = tmp_path / "run"
    done = start(command, f"--config={QUICK}", f"--workdir={workdir}", *flags).wait()
    assert done.status == 2, done.err
    assert message in done.error
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("command", "flag"), [("train", "config.encoding"), ("compare", "encodings")]
)
def test_an_own_encoding_that_is_not_chosen_is_one_line(command, flag, start, tmp_path):
    (file := tmp_path / "own.py").write_text(
        "from cope_jax.encodings import ENCODINGS, Encoding\n"
        '@ENCODINGS.register("mine")\nclass Mine(Encoding):\n    """None."""\n'
    )
    flags = (f"--{flag}=cope", f"--encoding={file}", f"--workdir={tmp_path / 'run'}")
    done = start(command, f"--config={QUICK}", *flags).wait()
    advice = f"registers mine, but --{flag} is cope: give --{flag}=mine, or leave out the file"
    assert done.status == 2 and done.error == f"{file} {advice}"


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("()", "'9:9'")])
def test_parentheses_empty_a_field_of_a_config(text, message, start, tmp_path):
    flags = ("--config=counting:small", f"--config.task.options.ood_pass_weights={text}")
    done = start("train", *flags, "--profile_steps=9:9", f"--workdir={tmp_path / 'run'}").wait()
    assert done.status == 2 and message in done.error


@pytest.mark.parametrize("command", ["train", "compare"])
def test_config_and_workdir_must_be_given(command, start, tmp_path):
    done = start(command, f"--workdir={tmp_path}").wait()
    assert (done.status, "--config" in done.error) == (2, True)
    done = start(command, f"--config={QUICK}").wait()
    assert (done.status, "--workdir" in done.error) == (2, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("def get_config(:\n", "invalid syntax"),
        ("from cope_jaxx import *\n", "No module named 'cope_jaxx'"),
        ("x = 1\n", "get_config"),
        ("def get_config():\n    return 3\n", "ConfigDict"),
        (
            "from cope_jax.training.config_files import experiment\n\n"
            "def get_config():\n    return experiment('flip_flap')\n",
            "unknown task 'flip_flap'",
        ),
    ],
    ids=["missing", "syntax", "import", "no get_config", "no ConfigDict", "task"],
)
def test_a_wrong_config_file_is_one_line(text, message, start, tmp_path):
    path = tmp_path / "config.py"
    if text is not None:
        path.write_text(text)
    done = start("train", f"--config={path}", f"--workdir={tmp_path / 'run'}").wait()
    assert done.status == 2, done.err
    assert message in done.error


@pytest.mark.parametrize("command", ["train", pytest.param("compare", marks=pytest.mark.slow)])
def test_a_workdir_that_cannot_be_written_to_is_one_line(command, start, config, tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "run", tmp_path / "file", Path("/proc/run")):
        done = start(command, f"--config={config}", f"--workdir={path}").wait()
        assert done.status == 2, done.err
        assert done.error.startswith(f"cannot write to {path} (") and done.error.endswith(
            "choose another --workdir"
        )
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_workdir_that_is_read_only_is_one_line(compare, workdir):
    workdir.chmod(0o500)
    done = compare(workdir).wait()
    workdir.chmod(0o700)
    assert done.status == 2, done.err
    assert "Permission denied" in done.error


def test_a_workdir_of_another_config_is_one_line_and_stays_as_it_is(
    start, compare, config, workdir
):
    before = contents(workdir)
    done = compare(workdir, "--config.optimizer.learning_rate=0.5").wait()
    assert done.status == 2, done.err
    assert (
        f"{workdir}/cells/cope/seed_0 holds a run with other settings, config.optimizer.learning_rate (0.001, not 0.5)"
        in done.error
    )
    cell = workdir / "cells/cope/seed_0"
    same = (f"--config={config}", *RARE, "--config.encoding=cope", f"--workdir={cell}")
    done = start("train", *same, "--seed=1").wait()
    assert done.status == 2, done.err
    assert f"{cell} holds a run with other settings, seeds ([0], not [1])" in done.error
    done = start("train", *same[:-1], f"--workdir={workdir}").wait()
    assert done.status == 2, done.err
    assert (
        f"{workdir} is a comparison, not a run of cope-jax train: choose another --workdir"
        in done.error
    )
    done = compare(cell).wait()
    assert done.status == 2, done.err
    assert (
        f"{cell} is a run of cope-jax train, not a comparison: choose another --workdir"
        in done.error
    )
    assert contents(workdir) == before


@pytest.mark.parametrize(
    "text",
    ['{"config": 3}']
    + [pytest.param(x, marks=pytest.mark.slow) for x in ("[" * 100_000, "", "\0\1\2", "null")],
)
def test_a_damaged_config_json_is_one_line(text, start, compare, workdir):
    cell = workdir / "cells/rope/seed_0"
    for folder in (workdir, cell):
        (folder / "config.json").write_text(text)
    done = compare(workdir).wait()
    assert done.status == 2, done.err
    assert str(workdir) in done.error
    for command in ("evaluate", "inspect"):
        done = start(command, f"--model={cell}").wait()
        assert done.status == 2, done.err
        assert str(cell) in done.error


@pytest.mark.slow
def test_a_damaged_result_is_one_line_that_says_how_to_go_on(compare, workdir, straight):
    result = workdir / "cells/rope/seed_0/result.json"
    for text in ('{"records": [', "null"):
        result.write_text(text)
        done = compare(workdir).wait()
        assert done.status == 2, done.err
        assert done.error.startswith(f"{result} is damaged") and "delete it" in done.error
    result.unlink()
    assert compare(workdir).wait().status == 0
    values = [
        [record["value"] for record in json.loads((folder / "results.json").read_text())["records"]]
        for folder in (workdir, straight[0])
    ]
    assert values[0] == values[1]


@pytest.mark.slow
def test_of_a_damaged_checkpoint_one_line_tells_and_the_one_before_is_used(
    start, compare, workdir, straight
):
    cell = workdir / "cells/rope/seed_0"
    newest = cell / "checkpoints" / "24"
    (cell / "result.json").unlink()
    (newest / "state" / "manifest.ocdbt").write_bytes(b"")
    done = start("evaluate", f"--model={cell}").wait()
    assert done.status == 0, done.err
    assert (
        f"warning: checkpoint {newest} cannot be read" in done.err
        and "using that of step 16" in done.err
    )
    assert newest.exists(), "who only looks moves nothing"
    done = compare(workdir).wait()
    assert done.status == 0, done.err
    assert f"warning: checkpoint {newest} cannot be read" in done.err
    assert (cell / "checkpoints-damaged" / "24").exists()
    values = [
        [record["value"] for record in json.loads((folder / "results.json").read_text())["records"]]
        for folder in (workdir, straight[0])
    ]
    assert values[0] == values[1]


@pytest.mark.slow
def test_where_no_checkpoint_can_be_read_one_line_says_how_to_go_on(start, compare, workdir):
    cell = workdir / "cells/rope/seed_0"
    (cell / "result.json").unlink()
    for manifest in cell.glob("checkpoints/*/state/manifest.ocdbt"):
        manifest.write_bytes(b"")
    # Who only reads may meet a run at work.
    for command, trains in ((compare(workdir), True), (start("inspect", f"--model={cell}"), False)):
        done = command.wait()
        assert done.status == 2, done.err
        assert f"no checkpoint in {cell / 'checkpoints'} can be read" in done.error
        assert "restore intact checkpoints" in done.error
        assert ("delete that folder" in done.error) == trains


@pytest.mark.parametrize("command", ["evaluate", "inspect"])
def test_only_a_trained_model_can_be_looked_at(command, start, workdir, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "empty", tmp_path / "nowhere", tmp_path / "file", workdir):
        done = start(command, f"--model={path}").wait()
        assert done.status == 2, done.err
        kind = f"{path} holds no training run" if path.is_dir() else f"there is no folder {path}"
        kind = f"{path} is no folder: give the folder of a model" if path.is_file() else kind
        assert done.error.startswith(kind)
    cell = workdir / "cells/cope/seed_0"
    assert done.error.endswith(f", but a comparison: give one of its runs, such as {cell}")
    for folder in (cell / "checkpoints").iterdir():
        shutil.rmtree(folder)
    done = start(command, f"--model={cell}").wait()
    assert (done.status, done.error) == (2, f"{cell} has no checkpoint yet: train it first")
    done = start(command).wait()
    assert (done.status, "--model" in done.error) == (2, True)
    done = start(command, f"--model={cell}", "more").wait()
    assert (done.status, "unexpected argument 'more'" in done.error) == (2, True)


def test_evaluate_needs_an_example(start, workdir):
    done = start("evaluate", f"--model={workdir}", "--examples=0").wait()
    assert (done.status, "--examples=0" in done.error) == (2, True)
