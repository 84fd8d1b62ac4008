"""Stops a long run gracefully."""

import itertools
import os
import signal
import threading
import types
from typing import Any

import jax
from jax.experimental import multihost_utils

WORDS = "\nfinishing the current steps, then saving"
AGAIN = "; press Ctrl-C again to quit immediately"


class GracefulStop:
    """A context manager in which Ctrl-C (SIGINT) and SIGTERM request a stop, to save and exit.

    A second Ctrl-C does what the first did before this context: by default, it raises
    KeyboardInterrupt. Only the main thread receives signals: in other threads, this context manager
    has no effect.

    With several processes, a signal to one process stops all processes after the same step. After
    `jax.distributed.initialize`, JAX's preemption service handles SIGTERM, and makes all processes
    agree on the step. Ctrl-C is forwarded to this service as SIGTERM.

    Args:
      later: whether a process that trains alone first leaves signals as they are, until `begin`.
        Before its first step, a run has nothing to save, and compilation may take minutes.

    Attributes:
      number: the signal that requested the stop; None if there was no request.
    """

    # JAX's service belongs to the process and stops at one count, so a later run must not restart
    # the count.
    _calls = itertools.count(1)

    def __init__(self, later: bool = False) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._alone = jax.process_count() == 1
        self._later = later and self._alone

    def __enter__(self) -> "GracefulStop":
        if not self._later:
            self.begin()
        return self

    def begin(self) -> None:
        """Begins to handle signals, unless it has begun."""
        numbers = (signal.SIGINT, signal.SIGTERM) if self._alone else (signal.SIGINT,)
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            if number not in self._before:
                self._before[number] = signal.signal(number, self._request)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """True if the run must save and exit now.

        Every process must call this after every dispatch. All processes get the same answer.
        """
        if self._alone:
            return self.number is not None
        if multihost_utils.reached_preemption_sync_point(next(self._calls)):
            self.number = signal.SIGTERM  # another process may have had the signal
            return True
        return False

    def _request(self, number: int, frame: types.FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            before = self._before[number]
            if callable(before):  # Python's own handler raises KeyboardInterrupt, too
                before(number, frame)
            raise KeyboardInterrupt
        self.number = number
        # Not print: the signal may have interrupted one, and its buffer is not reentrant.
        words = WORDS + AGAIN if number == signal.SIGINT else WORDS
        os.write(2, f"{words}\n".encode())
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
