"""Text and shards in a bucket, with a file system in memory in place of S3."""

import sys

import fsspec.registry  # noqa: F401  # registers file systems
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from cope_jax import tasks
from cope_jax.corpora import document_files
from cope_jax.corpora.export_sources import Files
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError


class ObjectStore(MemoryFileSystem):
    """Stands for S3: folders exist only as parts of names, and a listing of nothing is an error."""

    protocol = "s3"
    store: dict = {}  # noqa: RUF012  # shared by all instances, as the library wants it
    pseudo_dirs: list = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("s3://").strip("/")

    def mkdir(self, path, create_parents=True, **kwargs):
        pass

    def makedirs(self, path, exist_ok=False):
        pass


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", ObjectStore)
    monkeypatch.setattr(ObjectStore, "store", {})
    return epath.Path("s3://bucket")


def export_twice(files, out):
    """The second call finds what the first one wrote."""
    source = Files(tuple(document_files.find([f"{files}/*.txt"])), held_out=0.3)
    manifests = [
        export(source, out, Vocabulary("bytes"), Options(length=8, shard_tokens=400))
        for _ in range(2)
    ]
    assert manifests[0] == manifests[1]
    return manifests[0]


def test_a_bucket_gets_and_gives_what_a_disk_does(bucket, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(20):
        text = f"Document {number} has the number {number**3}.\n" * (number + 1)
        (tmp_path / f"in/{number}.txt").write_text(text)
        (bucket / f"in/{number}.txt").write_text(text)
    manifest = export_twice(tmp_path / "in", tmp_path / "out")
    assert len(manifest.shards) == 3
    assert export_twice(bucket / "in", bucket / "out") == manifest
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert names == {path.name for path in (bucket / "out").iterdir() if path.name != "parts"}
    for name in names:
        assert (bucket / "out" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    here, there = (
        tasks.create("sharded_text", folders=(str(root / "out"),), length=8)
        for root in (tmp_path, bucket)
    )
    np.testing.assert_equal(there.take("train", np.arange(50)), here.take("train", np.arange(50)))
    shard = bucket / "out" / manifest.shards[0].file
    content = bytearray(shard.read_bytes())
    content[9] ^= 1
    shard.write_bytes(content)
    again = tasks.create("sharded_text", folders=(str(bucket / "out"),), length=8)
    with pytest.raises(
        ConfigError, match=rf"^{shard} was changed or damaged: delete it and run the export again$"
    ):
        again.take("train", np.arange(1))
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"^{shard} is missing: run the export again$"):
        again.take("train", np.arange(1))
