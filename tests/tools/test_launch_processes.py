"""The launch scripts that run processes: what they start, pass on and leave with, for real."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.launching import LAUNCH, environment, until

# A command that outlives its connection: detached.sh


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


# One task of several: task.sh


def test_status_that_needs_a_person_is_the_highest_of_tasks():
    for status, reported in {0: 0, 2: 252, 3: 253, 4: 254, 143: 143, 134: 134}.items():
        assert subprocess.run([LAUNCH / "task.sh", "bash", "-c", f"exit {status}"]).returncode == reported


def test_task_passes_sigterm_on_and_waits(tmp_path):
    script = "trap 'sleep 0.3; touch saved; exit 4' TERM; touch up; for _ in {1..600}; do sleep 0.05; done"
    task = subprocess.Popen([LAUNCH / "task.sh", "bash", "-c", script], cwd=tmp_path)
    until((tmp_path / "up").exists)
    task.terminate()
    assert task.wait() == 254
    assert (tmp_path / "saved").exists()


# Several processes here: local_processes.sh


def trainer(folder: Path, body: str) -> Path:
    """A package whose command `train` is `body`, with its flags in `flags`."""
    (folder / "cope_jax").mkdir()
    (folder / "cope_jax" / "__init__.py").touch()
    (folder / "cope_jax" / "__main__.py").write_text(
        "import os, signal, sys, time\n"
        "flags = dict(word[2:].split('=', 1) for word in sys.argv[2:])\n"
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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 5)])
def test_local_processes_pass_a_signal_on_once_and_wait(number, status, tmp_path):
    body = f"""
def leave(*_):
    with open(f'left{{me}}', 'a') as file:
        file.write('once')
    time.sleep(0.5)
    sys.exit(0 if me else {status})
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
