"""Handles Ctrl-C before a command begins and inside JAX: prints one line and exits with status 130.

Elsewhere, Python raises KeyboardInterrupt as usual. Inside JAX, the exception could reach C++, which aborts the process
or drops the exception; an import may turn it into another error. Nothing needs to be saved in these places.
"""

import contextlib
import os
import signal
import sys
import types
from typing import Any

LINE = "interrupted; rerun the same command to resume"
_INSIDE = {"jax", "jaxlib", "importlib"}  # the first names of modules


def install() -> None:
    """Replaces Python's handler of SIGINT, and its hooks for uncaught exceptions and exceptions that callbacks drop."""
    dropped = sys.unraisablehook

    def uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        _leave_after_interrupt(kind)
        sys.__excepthook__(kind, error, trace)

    def unraisable(hook: Any) -> None:  # JAX runs a callback at each garbage collection, which drops exceptions
        _leave_after_interrupt(hook.exc_type)
        dropped(hook)

    sys.excepthook, sys.unraisablehook = uncaught, unraisable
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in a background job of a shell
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    inner = frame
    while inner is not None:
        if inner.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
            _leave()
        inner = inner.f_back
    signal.default_int_handler(number, frame)


def _leave_after_interrupt(kind: type[BaseException]) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _leave()


def _leave() -> None:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # closed, or interrupted while it is written to
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{LINE}\n".encode())
    os._exit(130)
