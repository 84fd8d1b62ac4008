"""A server of buckets on this machine, and a mirror of a folder there."""

import gc
import tempfile

import pytest

from cope_jax.storage import bucket as objects
from cope_jax.storage import bucket_lock
from cope_jax.storage.mirror import Mirror
from tests.storage.bucket_server import serving
from tests.storage.saving import URL


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory, monkeypatch):
    """Mirrors, and what cannot be copied into a bucket, lie below pytest's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick():
    """Damaged checkpoints collect garbage: not in the millions of objects of earlier tests."""
    gc.freeze()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(
        objects, "_RETRIES", {"max_retries": 2, "initial_delay": "0.01s", "max_delay": "0.02s"}
    )
    objects._opened.cache_clear()
    with serving() as running:
        yield running
    objects._opened.cache_clear()


@pytest.fixture
def mirror(server):
    created = Mirror.create(URL)
    yield created
    created.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bucket_lock, "BEAT", 0.1)
    monkeypatch.setattr(bucket_lock, "LOST", 0.6)
