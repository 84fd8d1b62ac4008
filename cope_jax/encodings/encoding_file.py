"""Encodings from a Python file outside of the package."""

import hashlib
import os
import re
import sys
import traceback
import types
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
    cope_jax.errors.ConfigError: 'mine.py' does not exist: give a file NAME.py that registers an \
encoding of your own

    Raises:
      ConfigError: the file is missing, fails, or registers no encoding.
    """
    file = Path(checked(path, str | os.PathLike, "encoding"))
    if not file.is_file() or file.suffix != ".py":
        kind = "is no Python file" if file.exists() else "does not exist"
        known = (
            "" if file.suffix == ".py" else "; --config.encoding or --encodings choose a known one"
        )
        raise ConfigError(
            f"{str(path)!r} {kind}: give a file NAME.py that registers an encoding of your own{known}"
        )
    data, name = file.read_bytes(), str(file.resolve())  # a module of this name hides no other
    digest, before = hashlib.sha256(data).hexdigest(), sys.modules.get(name)
    if getattr(before, _DIGEST, None) == digest:
        return _names(name)
    with ENCODINGS.kept_after_errors():
        ENCODINGS.forget(name)
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update({"__file__": name, _DIGEST: digest})
        try:
            # What was read, which a file in __pycache__ need not be.
            exec(compile(data, name, "exec"), vars(module))
            return _checked_names(name, path)
        except (Exception, SystemExit) as error:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the encoding of {path} fails: {_reason(error, name)}") from error


def _names(module: str) -> tuple[str, ...]:
    return tuple(name for name in ENCODINGS if ENCODINGS.get(name).__module__ == module)


def _checked_names(module: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
    for name in (names := _names(module)):
        if not re.fullmatch(r"[\w-]+", name) or not issubclass(ENCODINGS.get(name), Encoding):
            raise ConfigError(
                f"{path} registers {name!r}: register a subclass of Encoding, by a name of letters and digits"
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


def blamed(error: BaseException) -> str | None:
    """Returns one line on an error that such a file raised, or None for any other error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if hasattr(sys.modules.get(frame.filename), _DIGEST):
            return f"the encoding of {frame.filename} fails: {_reason(error, frame.filename)}"
    return None


def _reason(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    line = f"line {lines[-1]}: " if lines else ""
    return f"{line}{type(error).__name__}: {' '.join(str(error).split())}"
