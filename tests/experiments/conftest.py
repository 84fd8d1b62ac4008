import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experiments.commands import CONFIG, Command


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> Callable[..., Command]:
    """Starts a command: (name, *flags)."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one cache for all workers
    return functools.partial(Command, shared / "compiled")


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """A tiny config file."""
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG)
    return path
