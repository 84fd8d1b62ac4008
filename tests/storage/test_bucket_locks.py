"""Runs in buckets, against a server on this machine: who may write."""

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from cope_jax.errors import ConfigError, StorageError
from cope_jax.runs.workdir import Workdir
from cope_jax.storage import bucket_lock, checkpoint_bucket
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.mirror import Mirror, mirrored
from tests.storage.saving import URL, complete, save

pytestmark = [pytest.mark.xdist_group("buckets")]


def test_files_are_copied_before_the_lock_ends(server):
    with mirrored(URL) as folder:
        with Workdir(folder).locked():
            Path(folder, "result.json").write_text("{}")
        calls = [line for line in server.log if "result.json" in line or line.startswith("DELETE")]
    assert [line.split()[0] for line in calls] == ["POST", "DELETE"]


def test_a_second_run_is_refused_while_the_first_gives_signs_of_life(mirror, quick):
    with mirror.locked(".lock"), mirrored(URL) as folder:
        with pytest.raises(
            ConfigError, match=rf"^{URL} is in use by process {os.getpid()} on .*: wait until"
        ):
            with Workdir(folder).locked():
                pass
    with mirror.locked(".lock"):
        pass
    assert Bucket(URL).read(".lock")[0] is None


def test_a_lock_without_signs_of_life_ends(mirror, quick, capsys):
    sign = {
        "holder": "process 1 on tpu-7",
        "process": 1,
        "machine": "elsewhere",
        "token": "x",
        "number": 4,
    }
    Bucket(URL).write(".lock", json.dumps(sign).encode())
    began = time.monotonic()
    with mirror.locked(".lock"):
        assert time.monotonic() - began > 0.6
        first, second = capsys.readouterr().err.splitlines()
        assert (
            first
            == f"{URL} is locked by process 1 on tpu-7: waiting up to 1 s to see whether it still runs"
        )
        assert second == f"{URL}: the other run is gone, so this one continues"
    Bucket(URL).write(".lock", b"damaged")
    with mirror.locked(".lock"):
        pass


def test_a_killed_process_of_this_machine_holds_no_lock(mirror):
    code = "import os, sys; from cope_jax.storage.mirror import *; from cope_jax.storage.bucket_lock import *; "
    code += "Lock(Bucket(sys.argv[1]), '.lock', 'x')._acquire(); os.abort()"
    subprocess.run([sys.executable, "-c", code, URL], check=False)
    assert b"holder" in Bucket(URL).read(".lock")[0]
    began = time.monotonic()
    with mirror.locked(".lock"):
        assert time.monotonic() - began < 5


def test_one_of_many_takes_a_lost_lock(server, quick):
    Bucket(URL).write(".lock", b"damaged")
    taken = []

    def take(token):
        with contextlib.suppress(ConfigError):
            bucket_lock.Lock(Bucket(URL), ".lock", token)._acquire()
            taken.append(token)

    threads = [
        threading.Thread(target=take, args=(str(number),), daemon=True) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.5)
    assert len(taken) == 1 and bucket_lock.Lock(Bucket(URL), ".lock", taken[0]).is_held()


@pytest.mark.parametrize(
    "count", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5))]
)
def test_an_answer_that_is_lost_loses_no_lock(server, monkeypatch, count):
    """The server writes, but its answer is lost: the library asks again, and is refused."""
    monkeypatch.setattr(bucket_lock, "BEAT", 0.1)
    began = time.monotonic()
    server.fault, server.every = "applied", 1000
    server.requests = itertools.count(1000 - count)
    with mirrored(URL) as folder, Workdir(folder).locked():
        time.sleep(5 * bucket_lock.BEAT)
        Path(folder, "result.json").write_text("{}")
        Mirror.of(Path(folder, "checkpoints")).check_lock()
    assert time.monotonic() - began < 20 < bucket_lock.LOST
    assert server.names() == ["runs/cope/result.json"]


def test_a_store_without_conditions_is_refused(server, monkeypatch):
    write = Bucket.write
    monkeypatch.setattr(
        Bucket, "write", lambda bucket, name, data, expected=None: write(bucket, name, data)
    )
    with pytest.raises(
        ConfigError, match=rf"^{URL} is in a store that ignores the conditions of writes, [^\n]*$"
    ):
        with mirrored(URL) as folder, Workdir(folder).locked():
            pass
    assert server.names() == []


TAKEN = "in use by another run, because this one gave no sign of life for [^\n]*: what is stored is intact; stop one"


def test_a_run_that_has_lost_its_lock_writes_no_checkpoint_and_no_metrics(server):
    with (
        pytest.raises(StorageError, match=TAKEN),
        mirrored(URL) as folder,
        Workdir(folder).locked(),
    ):
        Bucket(URL).write(".lock", b'{"holder": "another"}')
        (Path(folder) / "metrics.jsonl").write_text("{}\n")
        save(Path(folder), [1])
    assert server.names() == ["runs/cope/.lock"]


def test_a_checkpoint_is_not_completed_or_removed_after_the_lock_is_lost(server, monkeypatch):
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1])
    write = checkpoint_bucket._write_arrays

    def lose(*arguments, **options):
        write(*arguments, **options)
        Bucket(URL).write(".lock", b'{"holder": "another"}')

    monkeypatch.setattr(checkpoint_bucket, "_write_arrays", lose)
    with (
        pytest.raises(StorageError, match=TAKEN),
        mirrored(URL) as folder,
        Workdir(folder).locked(),
    ):
        save(Path(folder), [2], keep=1)
    assert [name for name in server.names() if "checkpoints/2" in name]
    assert complete(server) == [1]
    for change in ("remove", "put_aside"):
        with pytest.raises(StorageError, match=TAKEN), mirrored(URL) as folder:
            store = checkpoint_bucket.CheckpointBucket(Mirror.of(Path(folder, "checkpoints")), "x")
            getattr(store, change)(1)
    assert complete(server) == [1] and not any(name.endswith(".damaged") for name in server.names())


@pytest.mark.parametrize("beats", [0, 10])
def test_nor_results(beats, server, quick):
    """The loss shows at the end, or in the sign of life before."""
    with (
        pytest.raises(StorageError, match=TAKEN),
        mirrored(URL) as folder,
        Workdir(folder).locked(),
    ):
        Bucket(URL).write(".lock", b'{"holder": "another"}')
        (Path(folder) / "result.json").write_text("{}\n")
        time.sleep(beats * bucket_lock.BEAT)
    assert server.names() == ["runs/cope/.lock"]


@pytest.mark.parametrize("change", ["save", "remove", "put_aside"])
def test_the_marker_of_a_new_holder_is_not_replaced(server, monkeypatch, change):
    """The lock is lost right after it was checked."""
    check, late = Mirror.check_lock, change == "save"
    marker = b'{"attempt": "of another"}'

    def lose(mirror):
        check(mirror)
        if not late or "/params.kernel/" in " ".join(server.names()):
            Bucket(URL).write("checkpoints/1/.complete", marker)

    with (
        pytest.raises(StorageError, match=TAKEN),
        mirrored(URL) as folder,
        Workdir(folder).locked(),
    ):
        if not late:
            save(Path(folder), [1])
        monkeypatch.setattr(Mirror, "check_lock", lose)
        if late:
            save(Path(folder), [1])
        else:
            getattr(
                checkpoint_bucket.CheckpointBucket(Mirror.of(Path(folder, "checkpoints")), "x"),
                change,
            )(1)
    assert Bucket(URL).read("checkpoints/1/.complete")[0] == marker


def test_a_process_of_another_user_is_alive(server):
    sign = {
        "holder": "x",
        "process": 1,
        "machine": bucket_lock.machine(),
        "token": "x",
        "number": 0,
    }
    assert not bucket_lock.is_gone(json.dumps(sign).encode())


def test_a_mirror_in_which_a_cell_has_its_lock_is_not_removed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    cell = tmp_path / "cope_jax-mirror-x/files/cell"
    cell.mkdir(parents=True)
    (tmp_path / "cope_jax-mirror-x/.mirror").write_text(
        json.dumps({"process": dead.pid, "machine": bucket_lock.machine()})
    )
    with (cell / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with mirrored(URL):
            assert cell.exists()
    with mirrored(URL):
        assert not cell.exists()


def test_a_bucket_that_refuses_conditions_is_one_line(mirror, server, monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT", 0.01)
    monkeypatch.setattr(Bucket, "write", lambda *_: None)
    with pytest.raises(
        StorageError,
        match=r"^gs://bucket/runs/cope refuses to write \.lock: check the settings of the",
    ):
        with Workdir(mirror.folder).locked():
            pass
