"""Laws and what they measure."""

from collections.abc import Callable
from typing import Any, NamedTuple

from cope_jax.testing.subject import Subject


class Measure(NamedTuple):
    """The outcome of a law.

    Attributes:
      error: the worst error.
      bound: the largest error that keeps the law.
      counterexample: where the law is broken, in words.
      tokens: (j, i) if token j changes output i, which must not depend on it.
    """

    error: float
    bound: float
    counterexample: str = ""
    tokens: tuple[int, int] | None = None


class Unchecked(Exception):
    """A law cannot be checked; the message says what to pass."""


class Law(NamedTuple):
    """A law, with the choices of `check` that it needs."""

    measure: Callable[[Subject], Measure]
    needs: tuple[str, ...]


LAWS: dict[str, Law] = {}


def law(name: str, *needs: str) -> Callable[[Any], Any]:
    """Registers a law under its name in the table."""

    def register(measure: Callable[[Subject], Measure]) -> Callable[[Subject], Measure]:
        LAWS[name] = Law(measure, needs)
        return measure

    return register
