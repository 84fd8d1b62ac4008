"""What only the first of several processes does."""

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
    """What the first process does before the others go on; where it fails, they leave without a word of their own.

    Gives whether this process is the first: the body acts upon that.
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
