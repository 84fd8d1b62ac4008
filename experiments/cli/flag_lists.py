"""Lists in flags: names, encodings with options in parentheses, numbers."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from cope_jax import encodings
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown


def check_names(kind: str, names: Sequence[str], choices: Collection[str]) -> None:
    """Raises ConfigError for a name that is not among the choices."""
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)


def read_names(flag: str, text: str, check: Callable[[str], Any]) -> list[str]:
    """The names of a flag with commas between them; ConfigError for one that `check` refuses, or one twice."""
    names = [name.strip() for name in encodings.split_outside_parentheses(text, ",")]
    for name in names:
        check(name)
        if names.count(name) > 1:
            raise ConfigError(f"--{flag} names {name!r} twice")
    return names


def read_numbers(flag: str, texts: Sequence[str]) -> list[int]:
    """Positive numbers; ConfigError for anything else.

    >>> read_numbers("lengths", ["512", "1k"])
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: --lengths takes positive numbers with commas between them, not '1k'
    """
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(f"--{flag} takes positive numbers with commas between them, not {text!r}")
    return [int(text) for text in texts]
