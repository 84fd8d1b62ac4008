import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experiments.commands import CONFIG, Command
from tests.experiments.pretrained import MODELS, TEXT_CONFIG


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


@pytest.fixture(scope="session")
def trained(start, tmp_path_factory):
    """A run of each model, a few steps old."""
    folder = tmp_path_factory.mktemp("contextual")
    for name, (task, options, model, encoding) in MODELS.items():
        path = folder / f"{name}_config.py"
        path.write_text(TEXT_CONFIG.format(task=task, options=options, model=model, encoding=encoding))
        done = start("train", f"--config={path}", f"--workdir={folder / name}").wait()
        assert done.status == 0, done.err
    return folder
