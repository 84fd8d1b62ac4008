"""Ends every command: turns errors into one line and an exit status."""

import contextlib
import errno
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from cope_jax.cli import interrupts
from cope_jax.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    StorageError,
    bucket_error,
    first_line,
    not_installed,
    storage_reason,
)

_OTHERS = 3.0  # how many seconds the other processes of a run may be behind the first
_WRONG_PATHS = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns errors that the user can fix into one line and an exit status.

    The status is 2 for wrong input, 3 for a loss that is not finite, 4 for a full or read-only disk
    or a bucket that cannot be used, 130 for Ctrl-C, 134 if another process is lost, 141 if the
    reader of the output is gone, as after `| head`, and 143 for SIGTERM.
    """
    try:
        yield
        sys.stdout.flush()  # here, so that its errors are caught
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (ConfigError, NonFiniteError, StorageError) as error:
        status = (
            2 if isinstance(error, ConfigError) else 3 if isinstance(error, NonFiniteError) else 4
        )
        _leave(status, f"error: {error}")
    except Interrupted as stop:
        _leave(stop.exit_code, str(stop))
    except KeyboardInterrupt as stop:
        _leave(128 + interrupts.signal_of(type(stop)), interrupts.LINE)
    except ModuleNotFoundError as error:
        if clear := bucket_error(error):
            _leave(2, f"error: {clear}")
        if line := not_installed(error):
            _leave(2, f"error: {line}")
        raise
    except Exception as error:
        encoding_file = sys.modules.get("cope_jax.encodings.encoding_file")
        if encoding_file and (line := encoding_file.blamed(error)):
            _leave(2, f"error: {line}")
        if clear := bucket_error(error):
            _leave(4 if isinstance(clear, StorageError) else 2, f"error: {clear}")
        if _out_of_memory(error):  # NumPy and XLA say how much was asked for
            _leave(
                2,
                f"error: the command needs more memory than there is ({first_line(error)}): lower its sizes",
            )
        if _several() and _lost_process(error):
            _leave(
                134,
                f"error: another process is lost ({first_line(error)}): rerun the command in all processes",
            )
        if reason := storage_reason(error):
            _leave(
                4,
                f"error: {StorageError.of(getattr(error, 'filename', None) or 'the disk', reason)}",
            )
        if isinstance(error, OSError) and error.filename and error.errno in _WRONG_PATHS:
            _leave(
                2,
                f"error: cannot use {str(error.filename)[:200]} ({error.strerror}): correct the path or the file",
            )
        if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
            platforms = os.environ.get("JAX_PLATFORMS") or "not set"
            reason = one_line(error) or "it is not installed"
            reason = f"JAX_PLATFORMS is {platforms} ({reason}): set it to an installed platform, such as cpu"
            _leave(2, f"error: JAX cannot start its backend, {reason}")
        raise


def _several() -> bool:
    """True in one of several processes of a run, which have imported JAX."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _from_device(error: Exception) -> bool:
    return "jax" in sys.modules and isinstance(error, sys.modules["jax"].errors.JaxRuntimeError)


def _out_of_memory(error: Exception) -> bool:
    full = _from_device(error) and re.search("(?i)out of memory", str(error))
    return isinstance(error, MemoryError) or bool(full)


def _lost_process(error: Exception) -> bool:
    lost = r"(?i)gloo|nccl|connection (reset|closed|refused)|heartbeat|peer"
    return _from_device(error) and bool(re.search(lost, str(error)))


def _leave(status: int, line: str) -> NoReturn:
    """Prints the line and exits; processes other than the first add their index."""
    line = "\\n".join(line.splitlines())  # a path may have line ends
    several = _several()
    index = sys.modules["jax"].process_index() if several else 0
    if index > 0:
        line = f"process {index}: {line}"
    # The disk of the log may be full; the status still says what happened.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    if several and index == 0 and status == 2:
        # The others find the same mistake; JAX would abort them as soon as this process ends.
        time.sleep(_OTHERS)
    if several and status in (4, 134):
        # The other processes wait inside a checkpoint, or are lost. An orderly exit would wait for
        # them in turn. JAX ends them when this process is gone.
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def no_late_words() -> Iterator[None]:
    """Closes stdout and stderr on exit, so that what threads of libraries print, or a full disk,
    changes nothing more.

    After a signal the process ends here, because unfinished computation or compilation would
    outlive the interpreter and crash.
    """
    try:
        yield
    except SystemExit as left:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            # The reader is gone, the disk is full, or it is closed.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if isinstance(left.__context__, KeyboardInterrupt) and not _several():
            os._exit(128 + interrupts.signal_of(type(left.__context__)))
        raise


def one_line(error: BaseException) -> str:
    """The message of an error, without the quotes that each KeyError around the error adds."""
    text: Any = error
    while isinstance(text, KeyError) and text.args:
        text = text.args[0]
    text = str(text)
    if isinstance(error, KeyError) or "\\'" in text:  # the repr of another error's message
        text = text.replace("\\n", " ").replace("\\'", "'").strip("'\"")
    return " ".join(text.split())
