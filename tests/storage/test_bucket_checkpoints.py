"""Runs in buckets, against a server on this machine: checkpoints."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.errors import StorageError
from cope_jax.runs.workdir import Workdir
from cope_jax.storage import checkpoint_bucket, checkpoint_io, checksum
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.storage.mirror import Mirror, mirrored
from tests.storage.saving import URL, complete, save, state

pytestmark = [pytest.mark.xdist_group("buckets")]


@pytest.mark.parametrize("fault", ["503", "403", "torn"])
def test_a_server_that_fails_while_a_checkpoint_is_read_or_written_damages_none(
    server, monkeypatch, fault
):
    read = checkpoint_bucket._read_arrays
    with (
        mirrored(URL) as folder,
        Workdir(folder).locked(),
        Checkpoints(Path(folder, "checkpoints")) as checkpoints,
    ):
        checkpoints.save(1, state(1), {"data": [1]})
        checkpoints.wait()
        monkeypatch.setattr(
            checkpoint_bucket,
            "_read_arrays",
            lambda *arguments: setattr(server, "fault", fault) or read(*arguments),
        )
        checkpoints.save(2, state(2), {"data": [2]})
        checkpoints.wait()
        with pytest.raises(StorageError, match=r"^a checkpoint cannot be read now \([^\n]*$"):
            checkpoints.restore(jax.eval_shape(lambda: state(0)))
        checkpoints.save(3, state(3), {"data": [3]})
        with pytest.raises(
            StorageError,
            match=rf"^{URL}[^\n]* cannot be used now \([^\n]*: what is stored is intact",
        ):
            checkpoints.wait()
        server.fault = ""
        monkeypatch.setattr(checkpoint_bucket, "_read_arrays", read)
        assert complete(server) == [1, 2]
        assert checkpoints.restore(jax.eval_shape(lambda: state(0)))[0] == 2


def restore(**options):
    with mirrored(URL) as folder, contextlib.ExitStack() as stack:
        if not options.get("read_only"):
            stack.enter_context(Workdir(folder).locked())
        with Checkpoints(Path(folder, "checkpoints"), **options) as checkpoints:
            restored = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    return restored and (
        restored[0],
        float(restored[1]["params"]["kernel"][0, 0]),
        tuple(restored[2]["data"]),
    )


def test_checkpoints_are_copied_whole_and_old_ones_removed(server, monkeypatch):
    remove = Bucket.remove
    monkeypatch.setattr(Bucket, "remove", lambda *arguments: time.sleep(0.2) or remove(*arguments))
    with mirrored(URL) as folder, Workdir(folder).locked():
        (Path(folder) / "metrics.jsonl").write_text('{"step": 1}\n')
        save(Path(folder), [1, 2, 3], keep=2)
        order = [
            line.split("name=")[1].partition("&")[0]
            for line in server.log
            if line.startswith("POST")
        ]
        assert sorted(path.name for path in Path(folder, "checkpoints").iterdir()) == ["2", "3"]
        assert order.index("runs%2Fcope%2Fmetrics.jsonl") < order.index(
            "runs%2Fcope%2Fcheckpoints%2F1%2F.complete"
        )
    assert complete(server) == [2, 3]
    assert not [name for name in server.names() if "checkpoints/1/" in name]
    removed = [
        line.split("/o/")[1].partition("?")[0] for line in server.log if line.startswith("DELETE")
    ]
    first, *others = (
        name for name in removed if name.startswith("runs%2Fcope%2Fcheckpoints%2F1%2F")
    )
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
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1, 2], keep=2)
    (name,) = (
        name for name in server.names() if "checkpoints/2/" in name and name.endswith(ending)
    )
    content, generation = server.objects.pop(("bucket", name))
    middle = content.index(b'"shape":[4') + 9 if ending.endswith("zarr.json") else len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
    if damage != "gone":
        retyped = content.replace(b"float32", b"uint32")
        damaged = {"short": content[:middle], "empty": b"", "flipped": flipped, "retyped": retyped}[
            damage
        ]
        server.objects["bucket", name] = damaged, generation
    gone = damage == "gone" and ending == ".complete"
    assert restore(read_only=True) == (1, 1.0, (1,))
    assert complete(server) == ([1] if gone else [1, 2])
    assert restore() == (1, 1.0, (1,))
    assert complete(server) == [1]
    assert ("cannot be read" in capsys.readouterr().err) == (not gone)
    kept = [name for name in server.names() if "checkpoints/2/" in name]  # for whoever can use it
    assert gone or kept
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [2], keep=1)
        save(Path(folder), [3], keep=1)
    assert complete(server) == [3]
    assert gone or {*kept} <= {*server.names()}


def test_unfinished_checkpoints_are_removed(server):
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1])
    Bucket(f"{URL}/checkpoints").write("copy/1/a", b"of somebody else")
    whole = server.names()
    for name in ("2/x/state/a", "1/y/state/a", "3/x/a"):
        Bucket(f"{URL}/checkpoints").write(name, b"")
    Bucket(f"{URL}/checkpoints").write("3/.damaged", b"x")
    with (
        mirrored(URL) as folder,
        Workdir(folder).locked(),
        Checkpoints(Path(folder, "checkpoints")),
    ):
        pass
    kept = [f"runs/cope/checkpoints/3/{name}" for name in (".damaged", "x/a")]
    assert server.names() == sorted([*whole, *kept])


def test_scores_that_cannot_be_read_now_are_not_taken_for_none(server, monkeypatch):
    with mirrored(URL) as folder, Workdir(folder).locked():
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
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1], keep=1)
        with (
            mirrored(URL) as other,
            Checkpoints(Path(other, "checkpoints"), read_only=True) as checkpoints,
        ):
            save(Path(folder), [2], keep=1)
            step, *_ = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    assert step == 2


def test_so_do_several(server):
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1, 2])
        with (
            mirrored(URL) as other,
            Checkpoints(Path(other, "checkpoints"), read_only=True) as checkpoints,
        ):
            save(Path(folder), [3, 4])
            step, *_ = checkpoints.restore(jax.eval_shape(lambda: state(0)))
    assert step == 4


def test_the_best_checkpoint_stays_after_a_new_start(server):
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1, 2], scores=[0.1, 0.5], keep=1, keep_best=1)
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [3, 4], scores=[0.7, 0.6], keep=1, keep_best=1)
    assert complete(server) == [1, 4]


def test_a_damaged_marker_beside_an_object_for_the_folder_removes_nothing(server):
    with mirrored(URL) as folder, Workdir(folder).locked():
        save(Path(folder), [1])
    Bucket(f"{URL}/checkpoints").write("1/", b"")
    Bucket(f"{URL}/checkpoints").write("1/.complete", b"{")
    whole = server.names()
    with (
        mirrored(URL) as folder,
        Workdir(folder).locked(),
        Checkpoints(Path(folder, "checkpoints")),
    ):
        pass
    assert server.names() == whole


def test_large_shards_are_divided_evenly(server, monkeypatch):
    monkeypatch.setattr(checkpoint_bucket, "_CHUNK", 100)
    state = {
        "table": jnp.arange(7.0 * 40).reshape(7, 40),
        "norm": jnp.ones(3),
        "step": jnp.int32(5),
    }
    with (
        mirrored(URL) as folder,
        Workdir(folder).locked(),
        Checkpoints(Path(folder, "checkpoints")) as checkpoints,
    ):
        checkpoints.save(1, state, {"data": []})
        checkpoints.wait()
        _, restored, _ = checkpoints.restore(state)
    assert checksum.of_arrays(restored) == checksum.of_arrays(state)
    sizes = [
        len(server.objects["bucket", name][0]) for name in server.names() if "/table/c/" in name
    ]
    assert len(sizes) == 4 * 2 and {*sizes} == {7 * 5 * 4}


def test_a_state_may_be_donated_as_soon_as_saving_returns(server):
    spoil = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    state = {"kernel": jnp.arange(2.0**20)}
    expected = checksum.of_arrays(state)
    with (
        mirrored(URL) as folder,
        Workdir(folder).locked(),
        Checkpoints(Path(folder, "checkpoints")) as checkpoints,
    ):
        server.fault = "slow"
        checkpoints.save(1, state, {"data": []})
        like = jax.eval_shape(lambda: state)
        spoiled = spoil(state)
        assert state["kernel"].is_deleted() and not spoiled["kernel"].any()
        server.fault = ""
        _, restored, _ = checkpoints.restore(like)
    assert checksum.of_arrays(restored) == expected


def meshed(shape, names):
    """From an axis, or None, to the sharding over a mesh of the first devices."""
    automatic = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(
        shape, names, devices=jax.devices()[: math.prod(shape)], axis_types=automatic
    )
    return lambda axis: jax.NamedSharding(mesh, jax.P(axis) if axis else jax.P())


def test_the_metadata_of_arrays_without_a_shard_here_are_awaited():
    awaited = []
    array = SimpleNamespace(result=lambda: awaited.append("created"))
    bucket = SimpleNamespace(clear_errors=contextlib.nullcontext, array=lambda *_, **__: array)
    bias = checkpoint_bucket._Shards((3,), (3,), np.dtype("float32"), [])
    checkpoint_bucket._write_arrays(bucket, "1/attempt", {"bias": bias}, create=True)
    assert awaited == ["created"]


@pytest.mark.parametrize("last", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_processes_is_complete_when_both_have_written(
    server, monkeypatch, last
):
    eight = meshed((8,), ("data",))
    split, whole = eight("data"), eight(None)
    state = {
        "kernel": jax.device_put(jnp.arange(48.0).reshape(16, 3), split),
        "bias": jax.device_put(jnp.arange(3.0), whole),
    }
    process, write = threading.local(), checkpoint_bucket._write_arrays

    def half(bucket, folder, arrays, create):
        halves = {
            n: dataclasses.replace(a, shards=a.shards[1 - process.index :: 2])
            for n, a in arrays.items()
        }
        write(bucket, folder, halves, create)

    monkeypatch.setattr(checkpoint_bucket, "_write_arrays", half)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: getattr(process, "index", 0))
    label = checkpoint_io.create_label(1, state, {"data": []}, None)
    with mirrored(URL) as folder, Workdir(folder).locked():
        writing = []
        for index in (1 - last, last):
            assert complete(server) == []
            process.index = index
            store = checkpoint_bucket.CheckpointBucket(
                Mirror.of(Path(folder, "checkpoints")), "same"
            )
            store._writer = concurrent.futures.ThreadPoolExecutor(
                1, initializer=setattr, initargs=(process, "index", index)
            )
            writing.append(store.save(1, state, {"data": []}, label))
            time.sleep(0.6)
            assert len(writing) == 2 or not writing[0].done()
        for each in writing:
            each.result(10)
    assert complete(server) == [1]
    monkeypatch.undo()
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    other = meshed((2, 2), ("data", "tensor"))
    # Any mesh reads it.
    for kernel, bias in ((split, whole), (other("tensor"), other(None)), (single, single)):
        shardings = {"kernel": kernel, "bias": bias}
        like = {
            n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[n])
            for n, leaf in state.items()
        }
        restored, progress = checkpoint_io.read(store, 1, like)
        assert {
            name: leaf.sharding for name, leaf in restored.items()
        } == shardings and progress == {"data": []}
        assert checksum.of_arrays(restored) == checksum.of_arrays(state)


def test_a_process_that_waits_for_another_in_vain_says_so(server, monkeypatch):
    monkeypatch.setattr(checkpoint_bucket, "_TIMEOUT", 0.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint_io, "of_first_process", lambda numbers: numbers)
    line = rf"^{URL}/checkpoints/1 is not complete 0 s after this process wrote its shards: earlier checkpoints [^\n]*$"
    with mirrored(URL) as folder, Workdir(folder).locked(), pytest.raises(StorageError, match=line):
        save(Path(folder), [1])
    assert complete(server) == []
