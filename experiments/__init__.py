"""The commands: the only place with flags."""

import os
import sys
import types
from typing import Any


def _without_traceback(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Ctrl-C before a command has begun, as while it imports, is no defect: one line, and exit status 130."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


def _not_ignored(unraisable: Any) -> None:
    """The same where Ctrl-C came in a callback whose exceptions Python drops, as in one of JAX at each collection."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    _dropped(unraisable)


sys.excepthook = _without_traceback
_dropped, sys.unraisablehook = sys.unraisablehook, _not_ignored
