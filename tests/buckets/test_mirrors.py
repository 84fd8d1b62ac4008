"""Runs in buckets, against a server on this machine: files and checkpoints."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from cope_jax.buckets import Bucket, Mirror, lock, mirrored, shown, unlink
from cope_jax.errors import ConfigError, StorageError, bucket_error
from cope_jax.files import in_bucket
from cope_jax.runs.workdir import locked
from cope_jax.training import checkpoint_bucket, checkpoint_io, checksum
from cope_jax.training.checkpoints import Checkpoints
from tests.buckets.saving import URL, complete, save, state

pytestmark = [pytest.mark.xdist_group("buckets")]


def test_objects_are_written_under_a_condition(server):
    bucket = Bucket(URL)
    nothing, missing = bucket.read("a")
    assert nothing is None
    first = bucket.write("a", b"1", missing)
    assert first and bucket.write("a", b"2", missing) is None
    assert bucket.read("a") == (b"1", first)
    assert bucket.write("a", b"2", first) and bucket.write("a", b"3", first) is None
    Bucket("gs://bucket/runs/cope2").write("a", b"other")
    Bucket("gs://bucket/runs").write("cope", b"other")
    assert bucket.names() == ["a"] and Bucket("gs://bucket").names("runs/cope") == [
        "runs/cope",
        "runs/cope/a",
        "runs/cope2/a",
    ]
    bucket.remove("")
    assert server.names() == ["runs/cope", "runs/cope2/a"]


@pytest.mark.parametrize("url", ["gs://", "s3:///", "s3:///runs/cope", "http://bucket/x", "gs:/bucket/x"])
def test_a_wrong_url_is_one_line(url):
    with pytest.raises(ConfigError, match=r"is no path in a bucket: write one like gs://BUCKET/runs/NAME"):
        Bucket(url)


def test_a_server_that_cannot_be_reached_is_told_once(server):
    server.fault = "503"
    with pytest.raises(StorageError) as caught:
        Bucket(URL).read("a")
    assert str(caught.value).count("cannot be used now") == 1


def test_a_missing_bucket_is_one_line(server):
    with pytest.raises(ConfigError, match=r"^gs://nowhere/x: there is no such bucket \(.*\): create it$"):
        with mirrored("gs://nowhere/x") as folder, locked(Path(folder)):
            pass


@pytest.mark.parametrize("fault", ["503", "429", "500", "403", "401", "torn"])
def test_a_failing_server_is_one_line_and_loses_nothing(mirror, server, fault):
    (mirror.folder / "a").write_text("new")
    server.fault = fault
    with pytest.raises(StorageError, match=rf"^{URL} cannot be used now \([^\n]*\): what is stored is intact; [^\n]*$"):
        mirror.push()
    server.fault = ""
    mirror.push()  # what was not copied is copied now
    assert Bucket(URL).read("a")[0] == b"new"


@pytest.mark.parametrize("fault", ["503", "403", "torn"])
def test_a_server_that_fails_while_a_checkpoint_is_read_or_written_damages_none(server, monkeypatch, fault):
    read = checkpoint_bucket._read_arrays
    monkeypatch.setattr(
        checkpoint_bucket, "_read_arrays", lambda *arguments: setattr(server, "fault", fault) or read(*arguments)
    )
    with mirrored(URL) as folder, locked(Path(folder)), Checkpoints(Path(folder, "checkpoints")) as checkpoints:
        checkpoints.save(1, state(1), {"data": [1]})
        checkpoints.save(2, state(2), {"data": [2]})
        checkpoints.wait()
        with pytest.raises(StorageError, match=r"^a checkpoint cannot be read now \([^\n]*$"):
            checkpoints.restore(jax.eval_shape(lambda: state(0)))
        checkpoints.save(3, state(3), {"data": [3]})
        with pytest.raises(StorageError, match=rf"^{URL}[^\n]* cannot be used now \([^\n]*: what is stored is intact"):
            checkpoints.wait()
        server.fault = ""
        monkeypatch.setattr(checkpoint_bucket, "_read_arrays", read)
        assert complete(server) == [1, 2]
        assert checkpoints.restore(jax.eval_shape(lambda: state(0)))[0] == 2


@pytest.mark.parametrize("fault", ["503", "torn"])
def test_a_fault_that_passes_is_not_noticed(server, fault):
    server.fault, server.every = fault, 2
    bucket = Bucket(URL)
    for number in range(10):
        bucket.write(f"a{number}", b"x")
    assert len(bucket.names()) == 10


def test_a_folder_comes_back_as_it_was(server, tmp_path):
    with mirrored(URL) as folder:
        assert list(Path(folder).iterdir()) == []  # for commands that need an empty folder
        path = Path(folder, "cells/cope/result.json")
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        for name in (".lock", "table.md.partial"):
            Path(folder, name).write_text("x")
        assert shown(path) == f"{URL}/cells/cope/result.json"
        assert shown(tmp_path) == str(tmp_path)
    assert not Path(folder).exists()
    assert server.names() == ["runs/cope/cells/cope/result.json"]
    writes = len([line for line in server.log if line.startswith("POST")])
    with mirrored(f"{URL}/") as folder:
        assert Path(folder, "cells/cope/result.json").read_text() == "{}"
    assert len([line for line in server.log if line.startswith("POST")]) == writes  # nothing has changed
    with mirrored(str(tmp_path)) as folder:
        assert folder == str(tmp_path)


def test_a_folder_inside_is_copied_once(server):
    with mirrored(URL) as folder:
        cell = Path(folder, "cells/cope")
        cell.mkdir(parents=True)
        (cell / "a").write_text("1")
        time.sleep(0.1)
        Mirror.of(cell).push()
        (Path(folder) / "b").write_text("2")
        time.sleep(0.1)
        server.log.clear()
    assert [line.split("name=")[1] for line in server.log if line.startswith("POST")] == ["runs%2Fcope%2Fb"]


def restore(**options):
    with mirrored(URL) as folder, contextlib.ExitStack() as stack:
        if not options.get("read_only"):
            stack.enter_context(locked(Path(folder)))
        with Checkpoints(Path(folder, "checkpoints"), **options) as checkpoints:
            found = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    return found and (found[0], float(found[1]["params"]["kernel"][0, 0]), tuple(found[2]["data"]))


def test_checkpoints_are_copied_whole_and_old_ones_removed(server, monkeypatch):
    remove = Bucket.remove
    monkeypatch.setattr(Bucket, "remove", lambda *arguments: time.sleep(0.2) or remove(*arguments))
    with mirrored(URL) as folder, locked(Path(folder)):
        (Path(folder) / "metrics.jsonl").write_text('{"step": 1}\n')
        save(Path(folder), [1, 2, 3], keep=2)
        order = [line.split("name=")[1].partition("&")[0] for line in server.log if line.startswith("POST")]
        assert sorted(path.name for path in Path(folder, "checkpoints").iterdir()) == ["2", "3"]
        assert order.index("runs%2Fcope%2Fmetrics.jsonl") < order.index("runs%2Fcope%2Fcheckpoints%2F1%2F.complete")
    assert complete(server) == [2, 3]
    assert not [name for name in server.names() if "checkpoints/1/" in name]
    removed = [line.split("/o/")[1].partition("?")[0] for line in server.log if line.startswith("DELETE")]
    first, *others = (name for name in removed if name.startswith("runs%2Fcope%2Fcheckpoints%2F1%2F"))
    assert first.endswith(".complete") and others
    assert restore() == (3, 3.0, (3,))
    for name in server.names():  # as if killed before the marker
        if name.endswith("checkpoints/3/.complete"):
            del server.objects["bucket", name]
    assert restore() == (2, 2.0, (2,))


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        *itertools.product(
            ["/params.kernel/c/0/0", "/params.kernel/zarr.json", "/key/c/0", ".complete"],
            ["short", "empty", "gone", "flipped"],
        ),
        ("/params.kernel/zarr.json", "retyped"),
    ],
)
def test_a_damaged_checkpoint_is_left_out(server, capsys, damage, ending):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1, 2], keep=2)
    (name,) = (name for name in server.names() if "checkpoints/2/" in name and name.endswith(ending))
    content, generation = server.objects.pop(("bucket", name))
    middle = content.index(b'"shape":[4') + 9 if ending.endswith("zarr.json") else len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
    if damage != "gone":
        retyped = content.replace(b"float32", b"uint32")
        damaged = {"short": content[:middle], "empty": b"", "flipped": flipped, "retyped": retyped}[damage]
        server.objects["bucket", name] = damaged, generation
    gone = damage == "gone" and ending == ".complete"
    assert restore(read_only=True) == (1, 1.0, (1,))
    assert complete(server) == ([1] if gone else [1, 2])
    assert restore() == (1, 1.0, (1,))
    assert complete(server) == [1]
    assert ("cannot be read" in capsys.readouterr().err) == (not gone)
    kept = [name for name in server.names() if "checkpoints/2/" in name]  # for whoever can use it
    assert gone or kept
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [2], keep=1)
        save(Path(folder), [3], keep=1)
    assert complete(server) == [3]
    assert gone or {*kept} <= {*server.names()}


def test_a_run_begins_with_what_the_one_before_left(server):
    with mirrored(URL) as late:
        with mirrored(URL) as folder, locked(Path(folder)):
            (Path(folder) / "result.json").write_text("first")
            save(Path(folder), [1])
        with mirrored(URL) as folder, locked(Path(folder)):
            (Path(folder) / "result.json").write_text("second")
            (Path(folder) / "table.md").write_text("second")
            save(Path(folder), [2], keep=1)
        Path(late, "table.md").write_text("of the late one")
        with locked(Path(late)):
            assert [path.name for path in Path(late, "checkpoints").iterdir()] == ["2"]
            assert Path(late, "result.json").read_text() == "second"
            assert Path(late, "table.md").read_text() == "of the late one"
    assert Bucket(URL).read("table.md")[0] == b"of the late one"


def test_a_file_that_is_removed_does_not_come_back(server):
    with mirrored(URL) as folder:
        Path(folder, "cells").mkdir()
        Path(folder, "cells/failed.json").write_text("{}")
    with mirrored(URL) as folder:
        unlink(Path(folder, "cells/failed.json"))
        unlink(Path(folder, "cells/none.json"))
        assert not Path(folder, "cells/failed.json").exists()
    assert server.names() == []


def test_unfinished_checkpoints_are_removed(server):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1])
    Bucket(f"{URL}/checkpoints").write("copy/1/a", b"of somebody else")
    whole = server.names()
    for name in ("2/x/state/a", "1/y/state/a", "3/x/a"):
        Bucket(f"{URL}/checkpoints").write(name, b"")
    Bucket(f"{URL}/checkpoints").write("3/.damaged", b"x")
    with mirrored(URL) as folder, locked(Path(folder)), Checkpoints(Path(folder, "checkpoints")):
        pass
    kept = [f"runs/cope/checkpoints/3/{name}" for name in (".damaged", "x/a")]
    assert server.names() == sorted([*whole, *kept])


def test_scores_that_cannot_be_read_now_are_not_taken_for_none(server, monkeypatch):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1], scores=[0.1], keep_best=1)
        read = Bucket.read

        def fail(bucket, name):
            if name.endswith(".complete"):
                raise StorageError("the bucket cannot be used now")
            return read(bucket, name)

        monkeypatch.setattr(Bucket, "read", fail)
        with pytest.raises(StorageError, match="cannot be used now"):
            Checkpoints(Path(folder, "checkpoints"), keep_best=1, read_only=True)
        monkeypatch.undo()


def test_a_checkpoint_that_vanishes_meanwhile_gives_way_to_a_newer_one(server):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1], keep=1)
        with mirrored(URL) as other, Checkpoints(Path(other, "checkpoints"), read_only=True) as checkpoints:
            save(Path(folder), [2], keep=1)
            step, *_ = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    assert step == 2


def test_so_do_several(server):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1, 2])
        with mirrored(URL) as other, Checkpoints(Path(other, "checkpoints"), read_only=True) as checkpoints:
            save(Path(folder), [3, 4])
            step, *_ = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    assert step == 4


def test_the_best_checkpoint_stays_after_a_new_start(server):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1, 2], scores=[0.1, 0.5], keep=1, keep_best=1)
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [3, 4], scores=[0.7, 0.6], keep=1, keep_best=1)
    assert complete(server) == [1, 4]


def test_a_damaged_marker_beside_an_object_for_the_folder_removes_nothing(server):
    with mirrored(URL) as folder, locked(Path(folder)):
        save(Path(folder), [1])
    Bucket(f"{URL}/checkpoints").write("1/", b"")
    Bucket(f"{URL}/checkpoints").write("1/.complete", b"{")
    whole = server.names()
    with mirrored(URL) as folder, locked(Path(folder)), Checkpoints(Path(folder, "checkpoints")):
        pass
    assert server.names() == whole


def test_large_shards_are_divided_evenly(server, monkeypatch):
    monkeypatch.setattr(checkpoint_bucket, "_CHUNK", 100)
    state = {"table": jnp.arange(7.0 * 40).reshape(7, 40), "norm": jnp.ones(3), "step": jnp.int32(5)}
    with mirrored(URL) as folder, locked(Path(folder)), Checkpoints(Path(folder, "checkpoints")) as checkpoints:
        checkpoints.save(1, state, {"data": []})
        checkpoints.wait()
        _, found, _ = checkpoints.restore(state)
    assert checksum.of_arrays(found) == checksum.of_arrays(state)
    sizes = [len(server.objects["bucket", name][0]) for name in server.names() if "/table/c/" in name]
    assert len(sizes) == 4 * 2 and {*sizes} == {7 * 5 * 4}


def test_a_state_may_be_donated_as_soon_as_saving_returns(server):
    spoil = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    state = {"kernel": jnp.arange(2.0**20)}
    expected = checksum.of_arrays(state)
    with mirrored(URL) as folder, locked(Path(folder)), Checkpoints(Path(folder, "checkpoints")) as checkpoints:
        server.fault = "slow"
        checkpoints.save(1, state, {"data": []})
        like = jax.eval_shape(lambda: state)
        spoiled = spoil(state)
        assert state["kernel"].is_deleted() and not spoiled["kernel"].any()
        server.fault = ""
        _, found, _ = checkpoints.restore(like)
    assert checksum.of_arrays(found) == expected


def meshed(shape, names):
    """From an axis, or None, to the sharding over a mesh of the first devices."""
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: math.prod(shape)], axis_types=automatic)
    return lambda axis: jax.NamedSharding(mesh, jax.P(axis) if axis else jax.P())


@pytest.mark.parametrize("last", [0, 1])
def test_a_checkpoint_of_two_processes_is_complete_when_both_have_written(server, monkeypatch, last):
    eight = meshed((8,), ("data",))
    split, whole = eight("data"), eight(None)
    state = {
        "kernel": jax.device_put(jnp.arange(48.0).reshape(16, 3), split),
        "bias": jax.device_put(jnp.arange(3.0), whole),
    }
    place, write = threading.local(), checkpoint_bucket._write_arrays

    def half(bucket, folder, arrays, create):
        own = {n: dataclasses.replace(a, shards=a.shards[1 - place.index :: 2]) for n, a in arrays.items()}
        write(bucket, folder, own, create)

    monkeypatch.setattr(checkpoint_bucket, "_write_arrays", half)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: getattr(place, "index", 0))
    label = checkpoint_io.create_label(1, state, {"data": []}, None)
    with mirrored(URL) as folder, locked(Path(folder)):
        writing = []
        for index in (1 - last, last):
            assert complete(server) == []
            place.index = index
            store = checkpoint_bucket.CheckpointBucket(Mirror.of(Path(folder, "checkpoints")), "same")
            store._writer = concurrent.futures.ThreadPoolExecutor(
                1, initializer=setattr, initargs=(place, "index", index)
            )
            writing.append(store.save(1, state, {"data": []}, label))
            time.sleep(0.6)
            assert len(writing) == 2 or not writing[0].done()
        for each in writing:
            each.result(10)
    assert complete(server) == [1]
    monkeypatch.undo()
    one, other = jax.sharding.SingleDeviceSharding(jax.devices()[3]), meshed((2, 2), ("data", "tensor"))
    for kernel, bias in ((split, whole), (other("tensor"), other(None)), (one, one)):  # any mesh reads it
        shardings = {"kernel": kernel, "bias": bias}
        like = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[n]) for n, leaf in state.items()}
        found, progress = checkpoint_io.read(store, 1, like)
        assert {name: leaf.sharding for name, leaf in found.items()} == shardings and progress == {"data": []}
        assert checksum.of_arrays(found) == checksum.of_arrays(state)


def test_a_process_that_waits_for_another_in_vain_says_so(server, monkeypatch):
    monkeypatch.setattr(checkpoint_bucket, "_TIMEOUT", 0.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint_io, "of_first_process", lambda numbers: numbers)
    line = rf"^{URL}/checkpoints/1 is not complete 0 s after this process wrote its shards: earlier checkpoints [^\n]*$"
    with mirrored(URL) as folder, locked(Path(folder)), pytest.raises(StorageError, match=line):
        save(Path(folder), [1])
    assert complete(server) == []


def test_what_could_not_be_copied_is_kept(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StorageError, match=rf"^{URL} cannot be used now [^\n]* were to be copied are in ") as caught:
        with mirrored(URL) as folder:
            Path(folder, "result.json").write_text("{}")
            server.fault = "503"
    kept = Path(str(caught.value).rpartition(" are in ")[2])
    assert (kept / "result.json").read_text() == "{}"
    server.fault = ""
    with mirrored(URL):
        assert (kept / "result.json").exists()


def test_only_mirrors_of_dead_processes_of_this_machine_are_removed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name, process, machine in (
        ("dead", dead.pid, lock.machine()),
        ("elsewhere", dead.pid, "another machine"),
        ("live", os.getpid(), lock.machine()),
    ):
        folder = tmp_path / f"cope_jax-mirror-{name}"
        folder.mkdir()
        (folder / ".mirror").write_text(json.dumps({"process": process, "machine": machine}))
    with mirrored(URL):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cope_jax-mirror-elsewhere", "cope_jax-mirror-live"]


def test_objects_for_folders_are_left_out_and_names_outside_refused(server):
    for name in ("", "sub/", "sub/a"):
        Bucket(URL).write(name, b"x")
    with mirrored(URL) as folder:
        assert [path.name for path in Path(folder).rglob("*")] == ["sub", "a"]
    Bucket(URL).write("../../escaped", b"x")
    with pytest.raises(ConfigError, match=rf"^{URL} has an object named \.\./\.\./escaped, outside of the folder"):
        with mirrored(URL):
            pass


def test_what_changes_while_it_is_copied_is_copied_again(mirror, monkeypatch):
    path, write = mirror.folder / "a", Bucket.write

    def slow(bucket, name, data, expected=None):
        found = write(bucket, name, data, expected)
        path.write_text("new")
        time.sleep(0.2)
        return found

    path.write_text("old")
    monkeypatch.setattr(Bucket, "write", slow)
    mirror.push()
    assert mirror.bucket.read("a")[0] == b"old"
    mirror.push()
    assert mirror.bucket.read("a")[0] == b"new"


def test_what_the_libraries_for_buckets_raise_is_one_line():
    refused = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})("no credentials\nmore")
    try:
        try:
            raise refused
        except Exception:
            raise RuntimeError("a thread failed") from None
    except RuntimeError as wrapped:
        found = bucket_error(wrapped)
    assert isinstance(found, StorageError)
    assert str(found).startswith("a bucket cannot be used now (no credentials): what is stored is intact; check the")
    missing = bucket_error(ImportError("Install s3fs to access S3"))
    assert isinstance(missing, ConfigError) and str(missing).endswith("is not installed: pip install -e '.[buckets]'")
    assert bucket_error(ImportError("no module x")) is None and bucket_error(OSError("the disk is full")) is None


def test_a_url_of_another_kind_is_one_line():
    assert not in_bucket("/runs/cope") and in_bucket("s3://bucket/cope")
    with pytest.raises(ConfigError, match=r"^ftp://x/y is not a folder or file: give a path on disk, or one that beg"):
        in_bucket("ftp://x/y")
