"""The scripts of experiments/launch: what they would ask of gcloud, kubectl, XPK and Slurm, and what they do here."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "experiments" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
RUNNABLE = [path for path in SCRIPTS if path.name not in ("common.sh", "tpu.sh")]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

VARIABLES = {
    "PROJECT": "lab",
    "ZONE": "us-west4-a",
    "NAME": "cope",
    "ACCELERATOR_TYPE": "v5litepod-16",
    "REPOSITORY": "https://example.org/cope-jax",
    "CONFIG": "experiments/configs/quick.py",
    "WORKDIR": "/shared/runs/quick",
    "IMAGE": "registry/cope",
    "TPU": "tpu-v5-lite-podslice",
    "TOPOLOGY": "4x4",
    "HOSTS": "4",
    "CHIPS_PER_HOST": "4",
    "CLAIM": "filestore",
    "MOUNT": "/shared",
    "CLUSTER": "pods",
    "TPU_TYPE": "v5litepod-16",
    "STORAGE": "files",
    "POLL_SECONDS": "0",
}

# The variables that an action of a script needs.
NEEDED = [
    ("tpu_vm.sh run", "PROJECT ZONE NAME ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR"),
    ("tpu_vm.sh create", "ACCELERATOR_TYPE"),
    ("tpu_vm.sh setup", "REPOSITORY"),
    ("tpu_vm.sh train", "CONFIG WORKDIR"),
    ("tpu_vm.sh fetch here", "WORKDIR"),
    ("tpu_slice.sh run", "PROJECT ZONE NAME ACCELERATOR_TYPE REPOSITORY CONFIG WORKDIR"),
    ("gke.sh apply", "NAME IMAGE TPU TOPOLOGY HOSTS CHIPS_PER_HOST CLAIM MOUNT CONFIG WORKDIR"),
    ("xpk.sh", "PROJECT ZONE CLUSTER NAME TPU_TYPE IMAGE STORAGE CONFIG WORKDIR"),
    ("local_processes.sh 2", "CONFIG WORKDIR"),
    ("slurm.sbatch", "CONFIG WORKDIR"),
]

# Stands for a program: notes its words and answers with the status and the output of the first answer whose pattern
# they match; each answer is given once, but for the last one of its pattern.
STAND_IN = """#!{python}
import json, re, sys
from pathlib import Path
folder = Path({folder!r})
words = [Path(sys.argv[0]).name, *sys.argv[1:]]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps([words, "" if sys.stdin.isatty() else sys.stdin.read()]) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
for pattern, queue in answers.items():
    if re.search(pattern, " ".join(words)):
        status, text = queue.pop(0) if len(queue) > 1 else queue[0]
        (folder / "answers.json").write_text(json.dumps(answers))
        print(text)
        sys.exit(status)
"""


class Stage:
    """A PATH whose gcloud, kubectl, xpk, srun and scontrol only note how they were called."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("gcloud", "kubectl", "xpk", "srun", "scontrol"):
            path = folder / "bin" / name
            path.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            path.chmod(0o755)
        self.answer({})

    def answer(self, answers):
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def run(self, command, cwd=ROOT, **changed):
        name, *words = shlex.split(command) if isinstance(command, str) else command
        variables = {name: value for name, value in (VARIABLES | changed).items() if value is not None}
        return subprocess.run(
            [LAUNCH / name, *words],
            cwd=cwd,
            env=environment() | variables | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self):
        path = self.folder / "calls.jsonl"
        return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def inputs(self):
        return [json.loads(line)[1] for line in (self.folder / "calls.jsonl").read_text().splitlines()]


def environment():
    return {name: value for name, value in os.environ.items() if name not in VARIABLES and "SLURM" not in name}


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def remote(call):
    """The words of a command that was to run on the hosts of a TPU."""
    line = next(word for word in call if word.startswith("--command=")).removeprefix("--command=")
    return shlex.split(line)


def verbs(calls):
    """What was asked of a TPU, in one word each."""
    found = (re.search(r"experiments\.train|worker_setup", " ".join(call)) for call in calls)
    return [match[0] if match else call[4] for match, call in zip(found, calls, strict=True)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_bash(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""


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


@pytest.mark.parametrize(
    ("command", "missing"), [(command, name) for command, names in NEEDED for name in names.split()]
)
def test_missing_variable_is_named_in_one_line(command, missing, stage):
    done = stage.run(command, **{missing: None})
    assert done.returncode == 2
    assert re.fullmatch(rf"error: set {missing} in the environment: see \S+ --help\n", done.stderr)
    assert not stage.calls, "nothing may be asked for before all is known"


@pytest.mark.parametrize("command", [command for command, names in NEEDED if "CONFIG" in names])
@pytest.mark.parametrize(
    ("workdir", "fault"), [("gs://bucket/run", "is no folder"), ("runs/here", "must be an absolute path")]
)
def test_workdir_must_be_a_path_on_every_host(command, workdir, fault, stage):
    done = stage.run(command, WORKDIR=workdir)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: WORKDIR={workdir} {fault}.*\n", done.stderr)
    assert not stage.calls


@pytest.mark.parametrize("name", ["tpu_vm.sh", "tpu_slice.sh", "gke.sh", "detached.sh", "local_processes.sh"])
@pytest.mark.parametrize("words", [[], ["dance", "now"]])
def test_unknown_action_is_refused(name, words, stage):
    done = stage.run([name, *words])
    assert done.returncode == 2
    assert re.fullmatch(r"error: .* --help\n", done.stderr)


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
    assert re.fullmatch(r"error: (gcloud|kubectl|xpk) is not installed, or not on PATH\n", done.stderr)


def test_flags_given_to_the_training_command_exist():
    code = "import experiments.train; from absl import flags; print(*flags.FLAGS)"
    known = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    given = {"distributed", "config", "workdir"}
    for path in SCRIPTS:
        for command in re.findall(r"experiments\.train ((?:.*\\\n)*.*)", path.read_text()):
            given |= set(re.findall(r"(?<=--)[a-z_]+(?==)", command))
    assert {"coordinator", "num_processes", "process_id"} <= given
    assert given <= set(known.split())


# One TPU VM


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_vm_is_created_with_the_version_of_its_kind(kind, version, stage):
    assert stage.run("tpu_vm.sh create", ACCELERATOR_TYPE=kind).returncode == 0
    words = f"gcloud compute tpus tpu-vm create cope --accelerator-type={kind} --version={version}"
    assert stage.calls == [[*words.split(), "--project=lab", "--zone=us-west4-a"]]


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
    assert verbs(stage.calls) == ["create", "worker_setup", "experiments.train"]
    words = remote(stage.calls[-1])
    assert words[:3] == ["cope-jax/experiments/launch/detached.sh", "run", "cope"]
    assert words[words.index("-m") :] == [
        *("-m", "experiments.train", "--config=experiments/configs/quick.py", "--workdir=/shared/runs/quick"),
        *("--distributed=off", *flags),
    ]


def test_setup_clones_and_prepares_on_every_host(stage):
    assert stage.run("tpu_vm.sh setup", REF="v0.1", PREPARE="sudo mount files:/ /shared").returncode == 0
    (call,) = stage.calls
    assert "--worker=all" in call
    script = next(word for word in call if word.startswith("--command=")).removeprefix("--command=")
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    assert script.startswith("set -e\nsudo mount files:/ /shared\n")
    assert "[ -d cope-jax ] || git clone --quiet --branch v0.1 https://example.org/cope-jax cope-jax\n" in script


@pytest.mark.parametrize("status", [2, 3, 4, 143])
def test_vm_train_leaves_with_the_status_of_the_training(status, stage):
    stage.answer({r"experiments\.train": [[status, ""]]})
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
            r"experiments\.train": [[143, ""], [130, ""], [0, ""]],
        }
    )
    done = stage.run("tpu_slice.sh run --seed=1")
    assert done.returncode == 0, done.stderr
    assert [verb for verb in verbs(stage.calls) if verb != "list"] == [
        *("create", "worker_setup", "experiments.train"),
        *("delete", "create", "worker_setup", "experiments.train"),
        *("worker_setup", "experiments.train"),
    ]
    create = next(call for call in stage.calls if "create" in call)
    words = "--node-id=cope --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
    assert set(words.split()) <= set(create)
    trained = [remote(call) for call in stage.calls if "experiments.train" in " ".join(call)]
    assert all(words[-2:] == ["--distributed=on", "--seed=1"] for words in trained)


@pytest.mark.parametrize("status", [2, 3, 4])
def test_slice_stops_where_a_person_is_needed(status, stage):
    stage.answer({r"queued-resources list": [[0, "ACTIVE"]], r"experiments\.train": [[status, ""]]})
    assert stage.run("tpu_slice.sh run").returncode == status
    assert verbs(stage.calls).count("experiments.train") == 1


def test_slice_that_is_there_and_fails_again_and_again_is_given_up(stage):
    stage.answer({r"queued-resources list": [[0, "ACTIVE"]], r"experiments\.train": [[1, ""], [143, ""], [1, ""]]})
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="2").returncode == 1
    assert verbs(stage.calls).count("experiments.train") == 4


def test_failures_of_a_slice_that_is_gone_do_not_count(stage):
    states = ["ACTIVE", "SUSPENDED", "SUSPENDED", ""] * 3 + ["ACTIVE"]
    stage.answer(
        {
            r"queued-resources list": [[0, state] for state in states],
            r"experiments\.train": [[255, ""], [255, ""], [255, ""], [0, ""]],
        }
    )
    assert stage.run("tpu_slice.sh run", MAX_FAILURES="1").returncode == 0


def test_slice_whose_state_cannot_be_told_is_not_asked_for_again(stage):
    stage.answer({r"queued-resources list": [[1, ""]]})
    assert stage.run("tpu_slice.sh run").returncode == 2
    assert set(verbs(stage.calls)) == {"list"}


# GKE and XPK


def test_template_of_gke_is_yaml():
    assert yaml.safe_load((LAUNCH / "gke.yaml").read_text())["kind"] == "JobSet"


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
        *("python", "-m", "experiments.train", "--config=experiments/configs/quick.py"),
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
            "experiments.train",
            "--config=experiments/configs/quick.py",
            "--workdir=/shared/runs/quick",
        ),
        *("--distributed=on", "--seed=1"),
    ]
    assert stage.calls[1:] == ([["scontrol", "requeue", "7"]] if requeued else [])


@pytest.mark.parametrize(("status", "reported"), [(0, 0), (2, 252), (3, 253), (4, 254), (143, 143), (134, 134)])
def test_status_that_needs_a_person_is_the_highest_of_tasks(status, reported):
    assert subprocess.run([LAUNCH / "task.sh", "bash", "-c", f"exit {status}"]).returncode == reported


def test_task_passes_sigterm_on_and_waits(tmp_path):
    script = "trap 'sleep 0.3; touch saved; exit 4' TERM; touch up; for _ in {1..600}; do sleep 0.05; done"
    task = subprocess.Popen([LAUNCH / "task.sh", "bash", "-c", script], cwd=tmp_path)
    until((tmp_path / "up").exists)
    task.terminate()
    assert task.wait() == 254
    assert (tmp_path / "saved").exists()


def test_slurm_is_told_to_warn_and_to_queue_again():
    options = re.findall(r"^#SBATCH (.*)$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(options)


def test_slurm_script_outside_of_slurm_is_refused(stage):
    done = stage.run("slurm.sbatch")
    assert (done.returncode, done.stderr) == (2, "error: submit it with sbatch: see slurm.sbatch --help\n")


# A command that outlives its connection


def detached(tmp_path, *words, **options):
    return subprocess.Popen(
        [LAUNCH / "detached.sh", *words],
        env=environment() | {"XDG_STATE_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def test_detached_shows_the_output_and_returns_the_status(tmp_path):
    command = ("bash", "-c", "echo 'one  two'; echo more >>ran; exit 3")
    first = detached(tmp_path, "run", "job", "1", *command, cwd=tmp_path)
    assert (first.communicate()[0], first.returncode) == ("one  two\n", 3)
    same = detached(tmp_path, "run", "job", "1", *command, cwd=tmp_path)
    assert (same.communicate()[0], same.returncode) == ("", 3)
    assert (tmp_path / "ran").read_text() == "more\n"
    later = detached(tmp_path, "run", "job", "2", *command, cwd=tmp_path)
    assert (later.communicate()[0], later.returncode) == ("one  two\n", 3)
    assert (tmp_path / "ran").read_text() == "more\nmore\n"


def test_detached_outlives_its_caller_is_joined_and_stopped(tmp_path):
    script = "trap 'sleep 0.5; touch saved; exit 7' TERM; touch up; for _ in {1..600}; do sleep 0.05; done"
    first = detached(tmp_path, "run", "job", "1", "bash", "-c", script, cwd=tmp_path, start_new_session=True)
    until((tmp_path / "up").exists)
    os.killpg(first.pid, signal.SIGHUP)
    os.killpg(first.pid, signal.SIGKILL)
    os.killpg(int((tmp_path / "cope_jax" / "job" / "pid").read_text()), signal.SIGHUP)  # the end of a login session
    first.communicate()
    second = detached(tmp_path, "run", "job", "2", "touch", "another", cwd=tmp_path)
    assert "joining" in second.stderr.readline()
    stop = detached(tmp_path, "stop", "job")
    assert stop.wait() == 0
    second.communicate()
    stop.communicate()
    assert second.returncode == 7
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "another").exists()


def test_detached_tells_of_a_command_that_was_killed_with_its_shell(tmp_path):
    for attempt, (script, status) in enumerate([("exit 3", 3), ("kill -KILL $PPID", 137)]):
        run = detached(tmp_path, "run", "job", str(attempt), "bash", "-c", script, cwd=tmp_path)
        run.communicate()
        assert run.returncode == status


# Several processes here


def trainer(folder: Path, body: str) -> Path:
    """A package whose experiments.train is `body`, with its flags in `flags`."""
    (folder / "experiments").mkdir()
    (folder / "experiments" / "__init__.py").touch()
    (folder / "experiments" / "train.py").write_text(
        "import os, signal, sys, time\n"
        "flags = dict(word[2:].split('=', 1) for word in sys.argv[1:])\n"
        "me = int(flags['process_id'])\n" + body
    )
    return folder


def local(folder, processes):
    return subprocess.Popen(
        [LAUNCH / "local_processes.sh", str(processes), "--seed=1"],
        cwd=folder,
        env=environment() | {"CONFIG": "quick.py", "WORKDIR": str(folder), "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_local_processes_do_not_ignore_ctrl_c_before_they_handle_it(tmp_path):
    run = local(
        trainer(tmp_path, "sys.exit(0 if signal.getsignal(signal.SIGINT) == signal.default_int_handler else 1)"), 1
    )
    run.communicate()
    assert run.returncode == 0


def test_local_processes_share_a_coordinator_and_have_their_own_number(tmp_path):
    run = local(trainer(tmp_path, "open(f'flags{me}', 'w').write(repr(flags))"), 3)
    assert run.communicate() == ("", "")
    assert run.returncode == 0
    given = [eval((tmp_path / f"flags{me}").read_text()) for me in range(3)]
    assert [flags.pop("process_id") for flags in given] == ["0", "1", "2"]
    assert given[0] == given[1] == given[2]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", given[0].pop("coordinator"))
    assert given[0] == {"config": "quick.py", "workdir": str(tmp_path), "num_processes": "3", "seed": "1"}


@pytest.mark.parametrize(
    ("statuses", "worst"), [((0, 143), 143), ((143, 1), 1), ((1, 3), 3), ((4, 143), 4), ((0, 0), 0)]
)
def test_local_processes_leave_with_the_status_that_most_needs_a_person(statuses, worst, tmp_path):
    run = local(trainer(tmp_path, f"sys.exit({statuses}[me])"), 2)
    run.communicate()
    assert run.returncode == worst


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_local_processes_pass_a_signal_on_once_and_wait(number, status, tmp_path):
    body = f"""
def leave(*_):
    with open(f'left{{me}}', 'a') as file:
        file.write('once')
    time.sleep(0.5)
    sys.exit({status})
signal.signal({int(number)}, leave)
open(f'up{{me}}', 'w').close()
time.sleep(60)
"""
    run = local(trainer(tmp_path, body), 2)
    until(lambda: all((tmp_path / f"up{me}").exists() for me in range(2)))
    os.killpg(run.pid, number)  # as a terminal does
    run.communicate()
    assert run.returncode == status
    assert [(tmp_path / f"left{me}").read_text() for me in range(2)] == ["once", "once"]
