"""Handles Ctrl-C before a command begins, such as during imports: prints one line and exits with status 130."""

import os
import sys
import types
from typing import Any


def install() -> None:
    """Replaces Python's hooks for uncaught exceptions, and for exceptions that callbacks drop."""
    dropped = sys.unraisablehook

    def uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        _leave_after_interrupt(kind)
        sys.__excepthook__(kind, error, trace)

    def unraisable(hook: Any) -> None:  # JAX runs a callback at each garbage collection, which drops exceptions
        _leave_after_interrupt(hook.exc_type)
        dropped(hook)

    sys.excepthook, sys.unraisablehook = uncaught, unraisable


def _leave_after_interrupt(kind: type[BaseException]) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
