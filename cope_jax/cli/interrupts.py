"""Answers Ctrl-C and SIGTERM from the start of a command: prints one line and exits with status 130
or 143.

In our own Python code, a signal raises KeyboardInterrupt or Terminated. Inside JAX, an exception
could reach C++, which aborts the process or drops the exception; an import may turn it into another
error. Nothing needs to be saved in these places, so the process exits at once. While C++ code
compiles or computes, Python calls no handler; after `PATIENCE` seconds, a thread ends the process
in its place.
"""

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
import types
from typing import Any

LINE = "interrupted; rerun the same command to resume"
PATIENCE = 3.0
_INSIDE = {"jax", "jaxlib", "importlib"}  # the first names of modules


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM."""


def install() -> None:
    """Replaces the handlers of SIGINT and SIGTERM, and the hooks for exceptions that nobody catches
    or callbacks drop.

    A signal that is ignored, as SIGINT in a background job of a shell, stays ignored.
    """
    dropped = sys.unraisablehook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        _leave_after_interrupt(kind)
        sys.__excepthook__(kind, error, trace)

    # JAX runs a callback at each garbage collection, which drops exceptions.
    def unraisable(hook: Any) -> None:
        _leave_after_interrupt(hook.exc_type)
        dropped(hook)

    answered: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer(number: int, frame: types.FrameType | None) -> None:
        answered.put(number)
        _interrupt(number, frame)

    def watch(signals: int) -> None:
        while True:
            number = os.read(signals, 1)[0]
            if signal.getsignal(number) is answer:
                try:
                    answered.get(timeout=PATIENCE)
                except queue.Empty:
                    _leave(number)

    sys.excepthook, sys.unraisablehook = uncaught, unraisable
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == default:
            signal.signal(number, answer)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
    threading.Thread(target=watch, args=(signals,), daemon=True).start()


def signal_of(kind: type[BaseException]) -> int:
    """The signal that raises a KeyboardInterrupt of this type."""
    return signal.SIGTERM if issubclass(kind, Terminated) else signal.SIGINT


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    inner = frame
    while inner is not None:
        if inner.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
            _leave(number)
        inner = inner.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _leave_after_interrupt(kind: type[BaseException]) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _leave(signal_of(kind))


def _leave(number: int) -> None:
    # Closed, or interrupted while it is written to.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{LINE}\n".encode())
    os._exit(128 + number)
