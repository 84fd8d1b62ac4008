"""The scripts of experiments/launch: what they would ask of gcloud and Slurm."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cope_jax.training.experiment_config import ExperimentConfig
from tests.tools.launching import LAUNCH, ROOT, VARIABLES, Stage, remote, verbs

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
RUNNABLE = [path for path in SCRIPTS if path.name != "common.sh"]
SHELLCHECK = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)

# The variables that an action of a script asks for, together or one group after another.
NEEDED = [
    ("tpu_slice.sh run", ["PROJECT ZONE NAME", "ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR"]),
    ("slurm.sbatch", ["CONFIG WORKDIR"]),
]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_scripts_are_bash():
    for path in SCRIPTS:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert done.stderr == "", path.name


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    done = subprocess.run(
        [SHELLCHECK, "--external-sources", *SCRIPTS], cwd=LAUNCH, capture_output=True, text=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_help_is_the_comment_at_the_head(path, stage):
    assert os.access(path, os.X_OK)
    done = stage.run([path.name, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert path.name in done.stdout
    assert not done.stdout.startswith("#")
    assert "set -euo pipefail" in path.read_text()
    assert "set -euo" not in done.stdout
    assert not stage.calls


@pytest.mark.parametrize(("command", "groups"), NEEDED)
def test_missing_variables_are_named_in_one_line(command, groups, stage):
    for names in groups:
        done = stage.run(command, **dict.fromkeys(names.split()))
        assert done.returncode == 2
        error = rf"error: set {names} in the environment: see \S+ --help\n"
        assert re.fullmatch(error, done.stderr)
    assert not stage.calls, "nothing may be asked for before all is known"


@pytest.mark.parametrize(
    "command", [command for command, groups in NEEDED if "CONFIG" in groups[-1]]
)
def test_workdir_must_be_a_path_on_every_host(command, stage):
    for workdir in ("ftp://host/run", "runs/here"):
        done = stage.run(command, WORKDIR=workdir)
        assert done.returncode == 2
        error = rf"error: WORKDIR={workdir} must be an absolute path or in a bucket.*\n"
        assert re.fullmatch(error, done.stderr)
    assert not stage.calls


@pytest.mark.parametrize("name", ["tpu_slice.sh", "detached.sh"])
def test_unknown_action_is_refused(name, stage):
    for words in ([], ["dance", "now"]):
        done = stage.run([name, *words])
        assert done.returncode == 2
        assert re.fullmatch(rf"error: .* {name} --help\n", done.stderr)


def test_missing_program_is_named(stage, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "basename", "dirname"):
        (bare / name).symlink_to(shutil.which(name))
    command = [LAUNCH / "tpu_slice.sh", "run"]
    done = subprocess.run(
        command, env=VARIABLES | {"PATH": str(bare)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: gcloud is not installed, or not on PATH: .*\n", done.stderr)


def test_flags_given_to_the_training_command_exist(start):
    known = set(re.findall(r"--(?:\[no\])?(\w+)", start("train", "--helpfull").wait().out))
    given = {"distributed", "config", "workdir"}
    for path in SCRIPTS:
        for command in re.findall(r"cope_jax train ((?:.*\\\n)*.*)", path.read_text()):
            given |= set(re.findall(r"(?<=--)[a-z_]+(?==)", command))
    assert given <= known


def test_docs_name_scripts_and_fields_that_exist():
    pages = "".join(
        (ROOT / "docs" / f"{name}.md").read_text() for name in ("training", "tpu", "gpu")
    )
    named = set(re.findall(r"experiments/launch/([\w.]+\w)", pages))
    assert named <= {path.name for path in LAUNCH.iterdir()}
    assert {"tpu_slice.sh", "slurm.sbatch"} <= named
    paths = re.findall(
        r"--config\.([a-z_.]+)=", pages + "".join(path.read_text() for path in SCRIPTS)
    )
    paths += re.findall(r"`((?:job|training|model)\.[a-z_.]+)[=`]", pages)
    known = ExperimentConfig().to_dict()
    for path in paths:
        value = known
        for name in path.split("."):
            assert name in value, f"there is no config.{path}"
            value = value[name]


# A slice


def slice_of(stage, states, *statuses):
    """Answers requests with the states of a slice and the exit statuses of the training on it."""
    trained = [[status, ""] for status in statuses]
    stage.answer(
        {
            r"queued-resources list": [[0, state] for state in states],
            r"cope_jax train": trained,
        }
    )


def test_a_slice_of_an_unknown_kind_needs_a_version(stage):
    done = stage.run("tpu_slice.sh run", ACCELERATOR_TYPE="v99-8")
    assert (done.returncode, stage.calls) == (2, []) and "set RUNTIME_VERSION" in done.stderr


def test_the_training_gets_its_flags_unharmed_and_setup_prepares_every_host(stage):
    flags = ["--config.encoding=cope(npos_max=16)", "--config.paper={'a b': \"$HOME\"}"]
    settings = {"REF": "v0.1", "PREPARE": "sudo mount files:/ /shared", "SPOT": "no"}
    settings["EXTRAS"] = "text,buckets"
    stage.answer({r"queued-resources list": [[0, ""], [0, "ACTIVE"]]})
    done = stage.run(["tpu_slice.sh", "run", *flags], **settings)
    assert done.returncode == 0, done.stderr
    asked = zip(stage.calls, verbs(stage.calls), strict=True)
    create, setup, train = (call for call, verb in asked if verb != "list")
    kind = {"--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite"}
    assert kind <= set(create)
    assert "--spot" not in create and "--worker=all" in setup
    script = next(word for word in setup if word.startswith("--command="))
    script = script.removeprefix("--command=")
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    assert script.startswith("set -e\nsudo mount files:/ /shared\n")
    clone = "git clone --quiet --branch v0.1 https://example.org/cope-jax cope-jax"
    assert f"[ -d cope-jax ] || {clone}\n" in script
    assert script.splitlines()[-1].split()[-2:] == ["tpu", "text\\,buckets"]
    words = remote(train)
    assert words[:3] == ["cope-jax/experiments/launch/detached.sh", "run", "cope"]
    assert words[words.index("-m") :] == [
        *("-m", "cope_jax", "train", "--config=quick", "--workdir=/shared/runs/quick"),
        *("--distributed=on", *flags),
    ]


def test_slice_goes_on_after_preemptions_until_the_training_is_done(stage):
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDING", "SUSPENDED", "", "ACTIVE"]
    slice_of(stage, [*states, "ACTIVE"], 143, 130, 0)
    done = stage.run("tpu_slice.sh run --seed=1")
    assert done.returncode == 0, done.stderr
    assert [verb for verb in verbs(stage.calls) if verb != "list"] == [
        *("create", "worker_setup", "cope_jax train"),
        *("delete", "create", "worker_setup", "cope_jax train"),
        *("worker_setup", "cope_jax train"),
    ]
    create = next(call for call in stage.calls if "create" in call)
    words = "--node-id=cope --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
    assert set(words.split()) <= set(create)
    trained = [remote(call) for call in stage.calls if "cope_jax train" in " ".join(call)]
    assert all(words[-2:] == ["--distributed=on", "--seed=1"] for words in trained)


def test_slice_stops_where_a_person_is_needed(stage):
    for number, status in enumerate((2, 3, 4), start=1):
        slice_of(stage, ["ACTIVE"], status)
        assert stage.run("tpu_slice.sh run").returncode == status
        assert verbs(stage.calls).count("cope_jax train") == number


@pytest.mark.slow
def test_slice_that_is_there_and_fails_again_and_again_is_given_up(stage):
    slice_of(stage, ["ACTIVE"], 1, 143, 1)
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="2").returncode == 1
    assert verbs(stage.calls).count("cope_jax train") == 4


@pytest.mark.slow
def test_failures_of_a_slice_that_is_gone_do_not_count(stage):
    states = ["ACTIVE", "SUSPENDED", "SUSPENDED", ""] * 3 + ["ACTIVE"]
    slice_of(stage, states, 255, 255, 255, 0)
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="1").returncode == 0


def test_slice_whose_state_cannot_be_told_is_not_asked_for_again(stage):
    stage.answer({r"queued-resources list": [[1, ""]]})
    assert stage.run("tpu_slice.sh run").returncode == 2
    assert set(verbs(stage.calls)) == {"list"}


# Slurm


@pytest.fixture
def project(tmp_path):
    """A folder that looks like an installed checkout."""
    folder = tmp_path / "project"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / "experiments").mkdir()
    (folder / "experiments" / "launch").symlink_to(LAUNCH)
    return folder


@pytest.mark.parametrize(
    ("status", "restarts", "left", "requeued"),
    [
        (0, "0", 0, False),
        (2, "0", 2, False),  # of srun itself
        (252, "0", 2, False),
        (253, "0", 3, False),
        (254, "0", 4, False),
        (255, "0", 0, True),
        (143, "0", 0, True),
        (1, "99", 0, True),
        (143, "100", 143, False),
    ],
)
def test_slurm_queues_the_job_again_while_it_should_go_on(
    status, restarts, left, requeued, stage, project
):
    stage.answer({"^srun": [[status, ""]]})
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(project), "SLURM_RESTART_COUNT": restarts}
    done = stage.run("slurm.sbatch --seed=1", cwd=project, **slurm)
    assert done.returncode == left, done.stderr
    task = stage.calls[0].index(str(project / "experiments" / "launch" / "task.sh"))
    assert stage.calls[0][task + 1 :] == [
        *(".venv/bin/python", "-m", "cope_jax", "train", "--config=quick"),
        *("--workdir=/shared/runs/quick", "--distributed=on", "--seed=1"),
    ]
    assert stage.calls[1:] == ([["scontrol", "requeue", "7"]] if requeued else [])


def test_slurm_is_told_to_warn_and_to_queue_again():
    options = re.findall(r"^#SBATCH (.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(options)


def test_slurm_script_outside_of_slurm_is_refused(stage):
    done = stage.run("slurm.sbatch")
    error = "error: submit slurm.sbatch with sbatch: see slurm.sbatch --help\n"
    assert (done.returncode, done.stderr) == (2, error)
