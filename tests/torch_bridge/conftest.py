"""One thread of PyTorch, because idle ones spin where several tests run at once."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
