"""A server of buckets on this machine, and a mirror of a folder there."""

import pytest

from cope_jax.buckets import Mirror, lock
from cope_jax.buckets import bucket as objects
from tests.buckets.bucket_server import serving
from tests.buckets.saving import URL


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(objects, "_RETRIES", {"max_retries": 2, "initial_delay": "0.01s", "max_delay": "0.02s"})
    objects._opened.cache_clear()
    with serving() as found:
        yield found
    objects._opened.cache_clear()


@pytest.fixture
def mirror(server):
    found = Mirror.create(URL)
    yield found
    found.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "LOST", 0.6)
