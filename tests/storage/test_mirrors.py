"""Runs in buckets, against a server on this machine: files."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from cope_jax.errors import ConfigError, StorageError, bucket_error
from cope_jax.runs.workdir import Workdir
from cope_jax.storage import bucket_lock
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.files import in_bucket
from cope_jax.storage.mirror import Mirror, mirrored, shown, unlink
from tests.storage.saving import URL, save

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


@pytest.mark.parametrize(
    "url", ["gs://", "s3:///", "s3:///runs/cope", "http://bucket/x", "gs:/bucket/x"]
)
def test_a_wrong_url_is_one_line(url):
    with pytest.raises(
        ConfigError, match=r"is no path in a bucket: write one like gs://BUCKET/runs/NAME"
    ):
        Bucket(url)


def test_a_server_that_cannot_be_reached_is_told_once(server):
    server.fault = "503"
    with pytest.raises(StorageError) as caught:
        Bucket(URL).read("a")
    assert str(caught.value).count("cannot be used now") == 1


def test_a_missing_bucket_is_one_line(server):
    with pytest.raises(
        ConfigError, match=r"^gs://nowhere/x: there is no such bucket \(.*\): create it$"
    ):
        with mirrored("gs://nowhere/x") as folder, Workdir(folder).locked():
            pass


@pytest.mark.parametrize("fault", ["503", "429", "500", "403", "401", "torn"])
def test_a_failing_server_is_one_line_and_loses_nothing(mirror, server, fault):
    (mirror.folder / "a").write_text("new")
    server.fault = fault
    with pytest.raises(
        StorageError,
        match=rf"^{URL} cannot be used now \([^\n]*\): what is stored is intact; [^\n]*$",
    ):
        mirror.push()
    server.fault = ""
    mirror.push()  # what was not copied is copied now
    assert Bucket(URL).read("a")[0] == b"new"


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
    # Nothing has changed.
    assert len([line for line in server.log if line.startswith("POST")]) == writes
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
    assert [line.split("name=")[1] for line in server.log if line.startswith("POST")] == [
        "runs%2Fcope%2Fb"
    ]


def test_a_run_begins_with_what_the_one_before_left(server):
    with mirrored(URL) as late:
        with mirrored(URL) as folder, Workdir(folder).locked():
            (Path(folder) / "result.json").write_text("first")
            save(Path(folder), [1])
        with mirrored(URL) as folder, Workdir(folder).locked():
            (Path(folder) / "result.json").write_text("second")
            (Path(folder) / "table.md").write_text("second")
            save(Path(folder), [2], keep=1)
        Path(late, "table.md").write_text("of the late one")
        with Workdir(late).locked():
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


def test_what_could_not_be_copied_is_kept(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        StorageError, match=rf"^{URL} cannot be used now [^\n]* were to be copied are in "
    ) as caught:
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
        ("dead", dead.pid, bucket_lock.machine()),
        ("elsewhere", dead.pid, "another machine"),
        ("live", os.getpid(), bucket_lock.machine()),
    ):
        folder = tmp_path / f"cope_jax-mirror-{name}"
        folder.mkdir()
        (folder / ".mirror").write_text(json.dumps({"process": process, "machine": machine}))
    with mirrored(URL):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cope_jax-mirror-elsewhere",
        "cope_jax-mirror-live",
    ]


def test_objects_for_folders_are_left_out(server):
    for name in ("", "sub/", "sub/a"):
        Bucket(URL).write(name, b"x")
    with mirrored(URL) as folder:
        assert [path.name for path in Path(folder).rglob("*")] == ["sub", "a"]


def test_what_changes_while_it_is_copied_is_copied_again(mirror, monkeypatch):
    path, write = mirror.folder / "a", Bucket.write

    def slow(bucket, name, data, expected=None):
        generation = write(bucket, name, data, expected)
        path.write_text("new")
        time.sleep(0.2)
        return generation

    path.write_text("old")
    monkeypatch.setattr(Bucket, "write", slow)
    mirror.push()
    assert mirror.bucket.read("a")[0] == b"old"
    mirror.push()
    assert mirror.bucket.read("a")[0] == b"new"


def test_what_the_libraries_for_buckets_raise_is_one_line():
    refused = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})(
        "no credentials\nmore"
    )
    try:
        try:
            raise refused
        except Exception:
            raise RuntimeError("a thread failed") from None
    except RuntimeError as wrapped:
        error = bucket_error(wrapped)
    assert isinstance(error, StorageError)
    assert str(error).startswith(
        "a bucket cannot be used now (no credentials): what is stored is intact; check the"
    )
    missing = bucket_error(ImportError("Install s3fs to access S3"))
    assert isinstance(missing, ConfigError) and str(missing).endswith(
        "is not installed: pip install 'cope-jax[buckets]'"
    )
    assert (
        bucket_error(ImportError("no module x")) is None
        and bucket_error(OSError("the disk is full")) is None
    )


def test_a_url_of_another_kind_is_one_line():
    assert not in_bucket("/runs/cope") and in_bucket("s3://bucket/cope")
    with pytest.raises(
        ConfigError,
        match=r"^ftp://x/y is not a folder or file: give a path on disk, or one that beg",
    ):
        in_bucket("ftp://x/y")
