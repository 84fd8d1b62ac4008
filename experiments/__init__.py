"""The commands: the only place with flags."""

import os
import sys
import types


def _without_traceback(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Ctrl-C before a command has begun, as while it imports, is no defect: one line, and exit status 130."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _without_traceback
