"""Published corpora, where the machine has them."""

import os
import pathlib

import pytest


def real(*names: str) -> str:
    """The directory of COPE_JAX_DATA; skips the test where it, or a file in it, is absent."""
    folder = os.environ.get("COPE_JAX_DATA")
    if not folder:
        pytest.skip("needs published corpora: set COPE_JAX_DATA to a directory that has them")
    for name in names:
        if not list(pathlib.Path(folder).glob(f"{name}*")):
            pytest.skip(f"needs {name} in COPE_JAX_DATA")
    return folder


def write(folder: pathlib.Path, name: str, text: str) -> str:
    """Writes a file of a data directory and gives the directory."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(folder)
