"""The scripts of experiments/launch: what they would ask of gcloud, kubectl, XPK and Slurm."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cope_jax.training.experiment_config import ExperimentConfig
from tests.tools.launching import LAUNCH, ROOT, VARIABLES, Stage, remote, verbs

SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
RUNNABLE = [path for path in SCRIPTS if path.name not in ("common.sh", "tpu.sh")]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

# The variables that an action of a script asks for, together or one group after another.
NEEDED = [
    ("tpu_vm.sh run", ["PROJECT ZONE NAME", "ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR"]),
    ("tpu_vm.sh create", ["ACCELERATOR_TYPE"]),
    ("tpu_vm.sh setup", ["REPOSITORY"]),
    ("tpu_vm.sh train", ["CONFIG WORKDIR"]),
    ("tpu_vm.sh fetch here", ["WORKDIR"]),
    ("tpu_slice.sh run", ["PROJECT ZONE NAME", "ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR"]),
    ("gke.sh apply", ["NAME", "IMAGE TPU TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM MOUNT CONFIG WORKDIR"]),
    ("xpk.sh", ["PROJECT ZONE CLUSTER NAME TPU_TYPE IMAGE STORAGE CONFIG WORKDIR"]),
    ("local_processes.sh 2", ["CONFIG WORKDIR"]),
    ("slurm.sbatch", ["CONFIG WORKDIR"]),
]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_scripts_are_bash():
    for path in SCRIPTS:
        assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == "", path.name


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    done = subprocess.run([SHELLCHECK, "--external-sources", *SCRIPTS], cwd=LAUNCH, capture_output=True, text=True)
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
        assert re.fullmatch(rf"error: set {names} in the environment: see \S+ --help\n", done.stderr)
    assert not stage.calls, "nothing may be asked for before all is known"


@pytest.mark.parametrize("command", [command for command, groups in NEEDED if "CONFIG" in groups[-1]])
def test_workdir_must_be_a_path_on_every_host(command, stage):
    for workdir in ("ftp://host/run", "runs/here"):
        done = stage.run(command, WORKDIR=workdir)
        assert done.returncode == 2
        assert re.fullmatch(rf"error: WORKDIR={workdir} must be an absolute path or in a bucket.*\n", done.stderr)
    assert not stage.calls


@pytest.mark.parametrize("name", ["tpu_vm.sh", "tpu_slice.sh", "gke.sh", "detached.sh", "local_processes.sh"])
def test_unknown_action_is_refused(name, stage):
    for words in ([], ["dance", "now"]):
        done = stage.run([name, *words])
        assert done.returncode == 2
        assert re.fullmatch(rf"error: .* {name} --help\n", done.stderr)


@pytest.mark.parametrize("command", ["tpu_vm.sh create", "gke.sh apply", "xpk.sh"])
def test_missing_program_is_named(command, stage, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "basename", "dirname", "env", "python3"):
        (bare / name).symlink_to(shutil.which(name))
    for name in ("gcloud", "kubectl", "xpk"):
        (tmp_path / "bin" / name).unlink()
    words = shlex.split(command)
    done = subprocess.run(
        [LAUNCH / words[0], *words[1:]], env=VARIABLES | {"PATH": str(bare)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: (gcloud|kubectl|xpk) is not installed, or not on PATH: .*\n", done.stderr)


def test_flags_given_to_the_training_command_exist(start):
    known = set(re.findall(r"--(?:\[no\])?(\w+)", start("train", "--helpfull").wait().out))
    given = {"distributed", "config", "workdir"}
    for path in SCRIPTS:
        for command in re.findall(r"cope_jax train ((?:.*\\\n)*.*)", path.read_text()):
            given |= set(re.findall(r"(?<=--)[a-z_]+(?==)", command))
    assert {"coordinator", "num_processes", "process_id"} <= given
    assert given <= known


def test_docs_name_scripts_and_fields_that_exist():
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("training", "tpu", "gpu"))
    named = set(re.findall(r"experiments/launch/([\w.]+\w)", pages))
    assert named <= {path.name for path in LAUNCH.iterdir()}
    assert {"tpu_vm.sh", "tpu_slice.sh", "gke.sh", "xpk.sh", "slurm.sbatch", "local_processes.sh"} <= named
    paths = re.findall(r"--config\.([a-z_.]+)=", pages + "".join(path.read_text() for path in SCRIPTS))
    paths += re.findall(r"`((?:job|training|model)\.[a-z_.]+)[=`]", pages)
    known = ExperimentConfig().to_dict()
    for path in paths:
        value = known
        for name in path.split("."):
            assert name in value, f"there is no config.{path}"
            value = value[name]


# One TPU VM


def test_vm_is_created_with_the_version_of_its_kind(stage):
    versions = {
        "v4-8": "tpu-ubuntu2204-base",
        "v5litepod-8": "v2-alpha-tpuv5-lite",
        "v5p-8": "v2-alpha-tpuv5",
        "v6e-8": "v2-alpha-tpuv6e",
    }
    for kind, version in versions.items():
        assert stage.run("tpu_vm.sh create", ACCELERATOR_TYPE=kind).returncode == 0
        words = f"gcloud compute tpus tpu-vm create cope --accelerator-type={kind} --version={version}"
        assert stage.calls[-1] == [*words.split(), "--project=lab", "--zone=us-west4-a"]


def test_vm_of_an_unknown_kind_needs_a_version(stage):
    done = stage.run("tpu_vm.sh create", ACCELERATOR_TYPE="v99-8")
    assert (done.returncode, stage.calls) == (2, [])
    assert "set RUNTIME_VERSION" in done.stderr
    assert stage.run("tpu_vm.sh create", ACCELERATOR_TYPE="v99-8", RUNTIME_VERSION="new", SPOT="yes").returncode == 0
    assert {"--version=new", "--spot"} <= set(stage.calls[0])


def test_vm_run_creates_installs_and_trains_with_the_flags_unharmed(stage):
    flags = ["--config.encoding=cope(npos_max=16)", "--config.paper={'a b': \"$HOME\"}"]
    done = stage.run(["tpu_vm.sh", "run", *flags])
    assert done.returncode == 0, done.stderr
    assert verbs(stage.calls) == ["create", "worker_setup", "cope-jax train"]
    words = remote(stage.calls[-1])
    assert words[:3] == ["cope-jax/experiments/launch/detached.sh", "run", "cope"]
    assert words[words.index("-m") :] == [
        *("-m", "cope_jax", "train", "--config=quick", "--workdir=/shared/runs/quick"),
        *("--distributed=off", *flags),
    ]


def test_setup_clones_and_prepares_on_every_host(stage):
    settings = {"REF": "v0.1", "PREPARE": "sudo mount files:/ /shared", "EXTRAS": "text,buckets"}
    assert stage.run("tpu_vm.sh setup", **settings).returncode == 0
    (call,) = stage.calls
    assert "--worker=all" in call
    script = next(word for word in call if word.startswith("--command=")).removeprefix("--command=")
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    assert script.startswith("set -e\nsudo mount files:/ /shared\n")
    assert "[ -d cope-jax ] || git clone --quiet --branch v0.1 https://example.org/cope-jax cope-jax\n" in script
    assert script.splitlines()[-1].split()[-2:] == ["tpu", "text\\,buckets"]


def test_one_machine_trains_in_a_bucket(stage):
    assert stage.run("tpu_vm.sh train", WORKDIR="gs://bucket/run").returncode == 0
    assert "--workdir=gs://bucket/run" in remote(stage.calls[-1])
    assert stage.run("tpu_vm.sh fetch here", WORKDIR="gs://bucket/run").returncode == 0
    assert stage.calls[-1][1:3] == ["storage", "cp"]


def test_vm_train_leaves_with_the_status_of_the_training(stage):
    for status in (2, 3, 4, 143):
        stage.answer({r"cope_jax train": [[status, ""]]})
        assert stage.run("tpu_vm.sh train").returncode == status


def test_only_delete_deletes(stage):
    for action in ("create", "setup", "train", "stop", "fetch here", "run"):
        assert stage.run(f"tpu_vm.sh {action}").returncode == 0
    assert not any("delete" in " ".join(call) for call in stage.calls)
    assert stage.run("tpu_vm.sh delete").returncode == 0
    assert verbs(stage.calls)[-1] == "delete"
    assert "cope" in stage.calls[-1]


# A slice


def test_slice_goes_on_after_preemptions_until_the_training_is_done(stage):
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDING", "SUSPENDED", "", "ACTIVE", "ACTIVE"]
    stage.answer(
        {
            r"queued-resources list": [[0, state] for state in states],
            r"cope_jax train": [[143, ""], [130, ""], [0, ""]],
        }
    )
    done = stage.run("tpu_slice.sh run --seed=1")
    assert done.returncode == 0, done.stderr
    assert [verb for verb in verbs(stage.calls) if verb != "list"] == [
        *("create", "worker_setup", "cope-jax train"),
        *("delete", "create", "worker_setup", "cope-jax train"),
        *("worker_setup", "cope-jax train"),
    ]
    create = next(call for call in stage.calls if "create" in call)
    words = "--node-id=cope --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
    assert set(words.split()) <= set(create)
    trained = [remote(call) for call in stage.calls if "cope-jax train" in " ".join(call)]
    assert all(words[-2:] == ["--distributed=on", "--seed=1"] for words in trained)


def test_slice_stops_where_a_person_is_needed(stage):
    for number, status in enumerate((2, 3, 4), start=1):
        stage.answer({r"queued-resources list": [[0, "ACTIVE"]], r"cope_jax train": [[status, ""]]})
        assert stage.run("tpu_slice.sh run").returncode == status
        assert verbs(stage.calls).count("cope-jax train") == number


def test_slice_that_is_there_and_fails_again_and_again_is_given_up(stage):
    stage.answer({r"queued-resources list": [[0, "ACTIVE"]], r"cope_jax train": [[1, ""], [143, ""], [1, ""]]})
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="2").returncode == 1
    assert verbs(stage.calls).count("cope-jax train") == 4


def test_failures_of_a_slice_that_is_gone_do_not_count(stage):
    states = ["ACTIVE", "SUSPENDED", "SUSPENDED", ""] * 3 + ["ACTIVE"]
    stage.answer(
        {
            r"queued-resources list": [[0, state] for state in states],
            r"cope_jax train": [[255, ""], [255, ""], [255, ""], [0, ""]],
        }
    )
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="1").returncode == 0


def test_slice_whose_state_cannot_be_told_is_not_asked_for_again(stage):
    stage.answer({r"queued-resources list": [[1, ""]]})
    assert stage.run("tpu_slice.sh run").returncode == 2
    assert set(verbs(stage.calls)) == {"list"}


# GKE and XPK


def test_gke_applies_one_pod_a_host_that_stops_where_a_person_is_needed(stage):
    flags = ["--config.paper={'a b': \"$HOME\"}", "--seed=1"]
    done = stage.run(["gke.sh", "apply", *flags])
    assert done.returncode == 0, done.stderr
    assert stage.calls == [["kubectl", "apply", "--filename=-"]]
    jobset = yaml.safe_load(stage.inputs[0])
    assert jobset["metadata"]["name"] == "cope"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 1000
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    assert container["command"] == [
        *("python", "-m", "cope_jax", "train", "--config=quick"),
        *("--workdir=/shared/runs/quick", "--distributed=on", *flags),
    ]


def test_gke_wants_the_workdir_on_the_volume(stage):
    done = stage.run("gke.sh apply", WORKDIR="/elsewhere/run")
    assert (done.returncode, stage.calls) == (2, [])
    assert "must be below MOUNT" in done.stderr


def test_xpk_is_given_the_whole_command(stage):
    flag = "--config.paper={'a b': \"$HOME\"}"
    assert stage.run(["xpk.sh", flag]).returncode == 0
    (call,) = stage.calls
    assert call[:3] == ["xpk", "workload", "create"]
    assert {"--tpu-type=v5litepod-16", "--storage=files", "--max-restarts=1000"} <= set(call)
    assert remote(call)[-2:] == ["--distributed=on", flag]


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
def test_slurm_queues_the_job_again_while_it_should_go_on(status, restarts, left, requeued, stage, project):
    stage.answer({"^srun": [[status, ""]]})
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(project), "SLURM_RESTART_COUNT": restarts}
    done = stage.run("slurm.sbatch --seed=1", cwd=project, **slurm)
    assert done.returncode == left, done.stderr
    task = stage.calls[0].index(str(project / "experiments" / "launch" / "task.sh"))
    assert stage.calls[0][task + 1 :] == [
        *(
            ".venv/bin/python",
            "-m",
            "cope-jax train",
            "--config=quick",
            "--workdir=/shared/runs/quick",
        ),
        *("--distributed=on", "--seed=1"),
    ]
    assert stage.calls[1:] == ([["scontrol", "requeue", "7"]] if requeued else [])


def test_slurm_is_told_to_warn_and_to_queue_again():
    options = re.findall(r"^#SBATCH (.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(options)


def test_slurm_script_outside_of_slurm_is_refused(stage):
    done = stage.run("slurm.sbatch")
    assert (done.returncode, done.stderr) == (2, "error: submit slurm.sbatch with sbatch: see slurm.sbatch --help\n")
