"""Leaving a long run in good order."""

import os
import signal
import types
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, saved a checkpoint, and stopped; the same command goes on."""


class Interruption:
    """A context manager in which Ctrl-C (SIGINT) and SIGTERM only set `requested`, so that the loop can save and leave.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: types.FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        # Not print: the signal may have come in the midst of one, and a buffer cannot be entered twice.
        os.write(2, b"\nsaving and stopping after the steps at work; Ctrl-C again to leave at once\n")
