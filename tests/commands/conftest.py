import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.commands import CONFIG, RARE, Command, Done
from tests.commands.pretrained import MODELS, write_model


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> Callable[..., Command]:
    """Starts a command: (name, *flags)."""
    base = tmp_path_factory.getbasetemp()
    # One cache for all workers.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return functools.partial(Command, shared / "compiled")


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """A tiny config file."""
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="session")
def compare(start, config) -> Callable[..., Command]:
    """Starts a comparison: (workdir, *flags, encodings, seeds)."""

    def begin(workdir, *flags, encodings="cope,rope", seeds=2):
        cells = (f"--encodings={encodings}", f"--seeds={seeds}")
        return start("compare", f"--config={config}", *cells, *RARE, f"--workdir={workdir}", *flags)

    return begin


@pytest.fixture(scope="session")
def straight(compare, tmp_path_factory) -> tuple[Path, Done]:
    """The workdir of a comparison without an interruption, and how it ended."""
    workdir = tmp_path_factory.mktemp("compare") / "new" / "folder"
    done = compare(workdir).wait()
    assert done.status == 0, done.err
    return workdir, done


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of each model."""
    folder = tmp_path_factory.mktemp("contextual")
    for name, described in MODELS.items():
        write_model(folder / name, *described, mlm_error=0.75, nsp_error=0.5)
    return folder
