"""Hostile names in a bucket or the temporary folder are never written, followed or waited for."""

import json
import os
import random
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from cope_jax.errors import ConfigError
from cope_jax.storage import bucket_lock
from cope_jax.storage.bucket import Bucket
from cope_jax.storage.mirror import Mirror, mirrored
from tests.storage.saving import URL

pytestmark = [pytest.mark.xdist_group("buckets")]

NAMES = [
    "/{out}/evil",
    "../../{out}",
    "a/../../../evil",
    "..",
    ".",
    "a/./b",
    "a//b",
    "a\\..\\b",
    "C:\\x",
    "C:/x",
    "a\0b",
    "link/evil",
    "n" * 300,
]


@pytest.fixture
def shared(server, tmp_path, monkeypatch):
    """The folder for temporary files, which other users share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    Path(tempfile.tempdir).mkdir()
    return Path(tempfile.tempdir)


@pytest.fixture
def dead():
    process = subprocess.Popen(["true"])
    process.wait()
    return {
        "process": process.pid,
        "machine": bucket_lock.machine(),
        "url": "gs://theirs/run",
        "token": "t",
    }


def within(seconds, action):
    """Runs an action that could wait for ever."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it waits"
    return results[0]


def enter(url=URL):
    with mirrored(url) as folder:
        return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_an_object_is_never_written_outside_of_the_mirror(
    name, server, shared, tmp_path, monkeypatch
):
    name = name.format(out=tmp_path / "evil")
    (tmp_path / "evil").mkdir()
    monkeypatch.setattr(Bucket, "names", lambda bucket, prefix="": ["good", name])
    monkeypatch.setattr(Bucket, "read", lambda bucket, name: (b"x", b""))
    mirror = Mirror(shared / "cope_jax-mirror-own/files", Bucket(URL), "")
    mirror.folder.mkdir(parents=True)
    (mirror.folder / "link").symlink_to(tmp_path / "evil")
    with pytest.raises(ConfigError) as caught:
        mirror.fetch()
    assert (
        str(caught.value)
        == f"{URL} has an object named {name!r}, which cannot be a file on this machine: rename it"
    )
    written = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert written == {"tmp/cope_jax-mirror-own/files/good"}


def test_objects_that_stand_in_each_others_way_are_one_line(server, shared):
    for names in (("a", "a/b"), ("b/.lock/c", "b/d", "b/d/.complete")):
        for name in names:
            Bucket(URL).write(name, b"x")
        with pytest.raises(
            ConfigError,
            match=rf"^{URL} has an object named '[^\n]*', which cannot be a file on this ",
        ):
            enter()
        Bucket(URL).remove("")


def test_objects_with_the_names_of_a_mirrors_own_files_are_neither_fetched_nor_obeyed(
    server, shared
):
    evil = json.dumps({"url": "gs://theirs/run", "token": "t"}).encode()
    names = [
        ".mirror",
        "cells/.mirror",
        "cope_jax-mirror-x/.mirror",
        ".lost",
        ".pushed",
        "cells/.mirror/x",
        "result.json",
    ]
    for name in names:
        Bucket(URL).write(name, evil)
    with mirrored(URL) as folder:
        assert [path.name for path in Path(folder).rglob("*")] == ["result.json"]
        for below in ("checkpoints", "cells/checkpoints", "cope_jax-mirror-x/run/checkpoints"):
            assert Mirror.of(Path(folder, below)).bucket.url == f"{URL}/{below}"


@pytest.mark.parametrize(
    "content",
    [
        "x",
        "{}",
        "[]",
        '{"process": 1e999, "machine": 1}',
        '{"url": 1, "token": []}',
        '{"url": "x"}',
        "\udcff",
    ],
)
def test_a_sign_of_no_mirror_is_not_obeyed(content, server, shared):
    for folder in (shared, shared / "cope_jax-mirror-theirs"):
        (folder / "files").mkdir(parents=True)
        (folder / ".mirror").write_bytes(content.encode(errors="surrogateescape"))
        assert Mirror.of(folder / "files") is None
    assert enter() == []
    assert (shared / "cope_jax-mirror-theirs").exists()


def test_the_folder_for_temporary_files_is_no_mirror(shared, dead):
    for folder in (shared, shared / "runs"):
        folder.mkdir(exist_ok=True)
        (folder / ".mirror").write_text(json.dumps(dead))
        assert Mirror.of(folder / "cope") is None


@pytest.mark.parametrize("pipe", [".mirror", "files/.lock", "files/cells/.lock"])
def test_a_pipe_of_another_user_is_not_waited_for(pipe, server, shared, dead):
    folder = shared / "cope_jax-mirror-theirs"
    path = folder / pipe
    path.parent.mkdir(parents=True)
    (folder / ".mirror").write_text(json.dumps(dead))
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert within(10, enter) == []
    assert within(10, lambda: Mirror.of(folder / "files") is None or pipe != ".mirror")


def test_folders_that_others_could_have_made_are_neither_used_nor_removed(
    server, shared, dead, monkeypatch
):
    (shared / "elsewhere").mkdir()
    (shared / "elsewhere/.mirror").write_text(json.dumps(dead))
    (shared / "cope_jax-mirror-link").symlink_to(shared / "elsewhere")
    folder = shared / "cope_jax-mirror-open"
    folder.mkdir()
    (folder / ".mirror").write_text(json.dumps(dead))
    folder.chmod(0o777)
    for theirs in (folder, shared / "cope_jax-mirror-link"):
        assert Mirror.of(theirs / "files") is None
    assert enter() == []
    assert (shared / "elsewhere/.mirror").exists() and (folder / ".mirror").exists()
    folder.chmod(0o755)
    assert Mirror.of(folder / "files").bucket.url == "gs://theirs/run"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert Mirror.of(folder / "files") is None


@pytest.mark.parametrize(
    "url", ["gs://bucket/../x", "gs://bucket/a//b", "s3://bucket/./a", "gs://../x"]
)
def test_a_url_whose_path_could_mean_another_is_refused(url):
    with pytest.raises(ConfigError, match="is no path in a bucket"):
        Bucket(url)


@pytest.mark.parametrize(
    "name", ["lr[1e-3]", "a*b", "a?b", "**", "100%25", "a#b", "a b", "é", "a\\b"]
)
def test_no_path_in_a_bucket_is_a_pattern(name, server):
    rng = random.Random(0)
    for other in ("lr1", "axb", "100%"):
        Bucket(f"gs://bucket/{other}").write("a", b"other")
    bucket, data = Bucket(f"gs://bucket/{name}"), rng.randbytes(9)
    bucket.write("a", data)
    assert (bucket.read("a")[0], bucket.names()) == (data, ["a"])
    assert f"{name}/a" in server.names()
    bucket.remove("")
    assert server.names() == ["100%/a", "axb/a", "lr1/a"]


def test_the_holder_of_a_lock_in_a_bucket_is_one_line_without_escapes():
    holder = bucket_lock._holder(json.dumps({"holder": "x\n\x1b[2J" + "y" * 10**6}).encode())
    assert holder.isprintable() and len(holder) == 100
