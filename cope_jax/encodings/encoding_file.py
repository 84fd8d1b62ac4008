"""Encodings from a Python file outside of the package."""

import hashlib
import os
import re
import sys
import traceback
from importlib import util
from pathlib import Path

from cope_jax.encodings.base import ENCODINGS, Encoding
from cope_jax.encodings.encoding_config import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.registry import checked

_DIGEST = "__sha256__"
"""The attribute of the module of such a file that has the digest of the file."""


def load(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Runs a Python file, and returns the names of the encodings that it registers.

    The names then work wherever those of the package do, also in the processes of a grid's cells. A
    file that has run already runs again only if it has changed.

    >>> load("mine.py")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: mine.py does not exist: give a file NAME.py that registers an \
encoding of your own

    Raises:
      ConfigError: the file is missing, fails, or registers no encoding.
    """
    file = Path(checked(path, str | os.PathLike, "encoding")).resolve()
    if not file.is_file() or file.suffix != ".py":
        kind = "is no Python file" if file.exists() else "does not exist"
        hint = "; --config.encoding or --encodings choose it" if str(path) in ENCODINGS else ""
        raise ConfigError(
            f"{path} {kind}: give a file NAME.py that registers an encoding of your own{hint}"
        )
    name = str(file)  # as the name of the module, so that it hides no other
    spec = util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if getattr(sys.modules.get(name), _DIGEST, None) != digest:
            module = sys.modules[name] = util.module_from_spec(spec)
            setattr(module, _DIGEST, digest)
            spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"the encoding of {path} fails: {_reason(error, file)}") from error
    entries = {entry: ENCODINGS.get(entry) for entry in ENCODINGS}
    names = tuple(entry for entry, kind in entries.items() if kind.__module__ == name)
    for entry in names:
        if not re.fullmatch(r"[\w-]+", entry) or not issubclass(entries[entry], Encoding):
            raise ConfigError(
                f"{path} registers {entry!r}: register a subclass of Encoding, by a name of letters and digits"
            )
    if not names:
        raise ConfigError(
            f"{path} registers no encoding: write @ENCODINGS.register('NAME') above its class"
        )
    return names


def files(encoding: str) -> dict[str, str]:
    """Returns the digest of each file that an encoding, or a part of it, is from, by its path."""
    parts = EncodingConfig.parse(encoding).parts
    modules = [sys.modules.get(ENCODINGS.get(name).__module__) for name, _ in parts]
    return {
        module.__name__: vars(module)[_DIGEST]
        for module in modules
        if module is not None and hasattr(module, _DIGEST)
    }


def _reason(error: Exception, file: Path) -> str:
    """The error in one line, with the line of the file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno]
    line = f"line {lines[-1]}: " if lines else ""
    return f"{line}{type(error).__name__}: {' '.join(str(error).split())}"
