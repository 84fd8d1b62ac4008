"""Locks are regular files, and no unfinished file of a process that lives is removed."""

import contextlib
import fcntl
import os
import socket
import tempfile

import pytest

from cope_jax.errors import ConfigError
from cope_jax.runs.workdir import Workdir
from cope_jax.storage import locks

HERE, ELSEWHERE = socket.gethostname(), "another-machine"
OLD = 10**6  # seconds since 1970


def test_a_lock_is_a_regular_file_and_no_link(tmp_path):
    with locks.open_lock(tmp_path / "lock") as file:
        file.write("x")
    with locks.open_lock(tmp_path / "lock") as file:
        assert file.read() == "x"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("pipe", "folder", "link", "dangling"):
        with pytest.raises(OSError):
            locks.open_lock(tmp_path / name)
    assert not (tmp_path / "new").exists() and (tmp_path / "lock").read_text() == "x"


@pytest.mark.parametrize(
    "content",
    [b"evil\n\x1b[2Jerror: paid\n", b"\xff\x00" * 9, b"x" * 10**6, b""],
    ids=["escapes", "no text", "long", "empty"],
)
def test_the_holder_of_a_lock_is_one_line_without_escapes(content, tmp_path):
    (tmp_path / ".lock").write_bytes(content)
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError) as caught, Workdir(tmp_path).locked():
            pass
    assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(tmp_path)) + 200


def left(room, machine, lock=True, old=True):
    folder = room / f"{locks.PARTIAL}{machine}-abcdefgh"
    (folder / "download").mkdir(parents=True)
    (folder / "download/archive").touch()
    if lock:
        (folder / ".lock").touch()
    for path in (folder, *folder.rglob("*")) if old else ():
        os.utime(path, (OLD, OLD))
    return folder


@pytest.mark.parametrize("machine", [HERE, ELSEWHERE])
def test_unfinished_files_stay_while_their_lock_is_held(machine, tmp_path):
    folder = left(tmp_path, machine)
    with (folder / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(folder, (OLD, OLD))
        locks.remove_abandoned(tmp_path)
        assert (folder / "download/archive").exists()
    locks.remove_abandoned(tmp_path)
    assert not folder.exists()


def test_a_lock_is_tried_with_a_file_that_may_be_written(tmp_path, monkeypatch):
    """As NFS demands of an exclusive lock."""
    folder, flock = left(tmp_path, HERE), fcntl.flock
    monkeypatch.setattr(
        fcntl, "flock", lambda file, how: (os.write(file.fileno(), b""), flock(file, how))
    )
    locks.remove_abandoned(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("machine", [f"{HERE}-2", ELSEWHERE])
@pytest.mark.parametrize("lock", [False, True])
def test_without_a_lock_of_this_machine_the_newest_file_decides(machine, lock, tmp_path):
    folder = left(tmp_path, machine, lock)
    os.utime(folder / "download/archive")  # which grows, while the times of all folders are old
    locks.remove_abandoned(tmp_path)
    assert folder.exists()
    os.utime(folder / "download/archive", (OLD, OLD))
    locks.remove_abandoned(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("url", [None, "gs://bucket/out"])
def test_what_has_no_folder_here_is_prepared_in_that_for_temporary_files(
    url, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, elsewhere = left(tmp_path, HERE, old=False), left(tmp_path, ELSEWHERE, old=False)
    with locks.unfinished(url) as folder:
        assert folder.parent == tmp_path and elsewhere.exists() and not dead.exists()
        locks.remove_abandoned(url)
        assert folder.exists()
    with contextlib.suppress(KeyError), locks.unfinished(tmp_path / "new/out") as failed:
        assert failed.parent == tmp_path / "new/out"
        raise KeyError
    assert not folder.exists() and not list((tmp_path / "new/out").iterdir())
