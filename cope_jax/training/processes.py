"""Runs code only in the first of several processes."""

import contextlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[bool]:
    """A context in which the first process works before the others continue; if it fails, they exit without a message.

    Yields whether this process is the first; only then should the body act.
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
