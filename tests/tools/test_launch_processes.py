"""The launch scripts that run processes: what they start, pass on and leave with, for real."""

import os
import signal
import subprocess

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


@pytest.mark.slow
def test_detached_outlives_its_caller_is_joined_and_stopped(tmp_path):
    script = "trap 'sleep 0.5; touch saved; exit 7' TERM; touch up; for _ in {1..600}; do sleep 0.05; done"
    first = detached(
        tmp_path, "run", "job", "1", "bash", "-c", script, cwd=tmp_path, start_new_session=True
    )
    until((tmp_path / "up").exists)
    os.killpg(first.pid, signal.SIGHUP)
    os.killpg(first.pid, signal.SIGKILL)
    # The end of a login session.
    os.killpg(int((tmp_path / "cope_jax" / "job" / "pid").read_text()), signal.SIGHUP)
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


@pytest.mark.slow
def test_detached_tells_of_a_command_that_was_killed_with_its_shell(tmp_path):
    for attempt, (script, status) in enumerate([("exit 3", 3), ("kill -KILL $PPID", 137)]):
        run = detached(tmp_path, "run", "job", str(attempt), "bash", "-c", script, cwd=tmp_path)
        run.communicate()
        assert run.returncode == status


# One task of several: task.sh


def test_status_that_needs_a_person_is_the_highest_of_tasks():
    for status, reported in {0: 0, 2: 252, 3: 253, 4: 254, 143: 143, 134: 134}.items():
        assert (
            subprocess.run([LAUNCH / "task.sh", "bash", "-c", f"exit {status}"]).returncode
            == reported
        )


def test_task_passes_sigterm_on_and_waits(tmp_path):
    script = "trap 'sleep 0.3; touch saved; exit 4' TERM; touch up; for _ in {1..600}; do sleep 0.05; done"
    task = subprocess.Popen([LAUNCH / "task.sh", "bash", "-c", script], cwd=tmp_path)
    until((tmp_path / "up").exists)
    task.terminate()
    assert task.wait() == 254
    assert (tmp_path / "saved").exists()
