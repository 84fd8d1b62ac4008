"""Lets only the first of several processes execute code."""

import contextlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """True in the process that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[bool]:
    """A context in which the first process works before the others.

    Yields True in the first process and False in the others; the body should act only if the value
    is True. If the first process fails, the others exit silently.
    """
    if jax.process_count() == 1:
        yield True
        return
    try:
        yield is_first()
    except BaseException:
        if is_first():
            multihost_utils.broadcast_one_to_all(np.int32(0))
        raise
    if not int(multihost_utils.broadcast_one_to_all(np.int32(1))):
        sys.exit(2)
