"""The lines of a package that tests execute, also in processes that import only this file."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

FOLDER = "COPE_JAX_LINES_OF_CHILDREN"  # where such processes leave what they note
PREFIX = "COPE_JAX_LINES_OF"


def note_lines(prefix: str, note: Callable[[str, int], None]) -> None:
    """Calls `note(path, line)` for each line that functions of such paths execute, in this thread
    and new ones.
    """

    def of_function(frame, event, _):
        path = frame.f_code.co_filename
        if not path.startswith(prefix) or frame.f_code.co_name == "<module>":
            return None

        def of_line(frame, event, _):
            note(path, frame.f_lineno)
            return of_line

        return of_line

    threading.settrace(of_function)
    sys.settrace(of_function)


def note_lines_of_a_child() -> None:
    """Notes the lines that a forked child executes."""
    seen = set()

    def note(path: str, line: int) -> None:
        if (path, line) not in seen:
            seen.add((path, line))
            with open(Path(os.environ[FOLDER]) / str(os.getpid()), "a") as file:
                file.write(f"{path}:{line}\n")

    note_lines(os.environ[PREFIX], note)
