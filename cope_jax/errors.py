"""Errors that end a command with one line; all other exceptions keep their traceback."""

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator

STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a full disk, an exceeded quota, the maximum size of files, a read-only file system."""

_BUCKET_LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google")


EXTRAS = {
    "lab": (
        *(
            "array_record",
            "grain",
            "importlib_resources",
            "matplotlib",
            "ml_collections",
            "requests",
        ),
        *("safetensors", "tensorboardX", "tensorflow_datasets", "tqdm", "vl_convert"),
    ),
    "text": ("gensim", "h5py", "sklearn", "tokenizers"),
    "torch": ("torch", "transformers"),
}
"""Modules that the package alone does not install, by the extra that does."""


class ConfigError(ValueError):
    """Wrong input that the user can fix: a one-line message says what is wrong and what to do.

    Commands print the message and exit with status 2.
    """


class NonFiniteError(RuntimeError):
    """A loss, gradient, update or logit is not finite; the message says where. Exit status 3."""


class StorageError(OSError):
    """The disk is full or read-only, or a file is unreadable now; complete files stay intact.

    Commands print the message and exit with status 4.
    """

    @classmethod
    def of(cls, path: object, reason: str) -> "StorageError":
        """Creates the error for a failed write to `path`, with the standard message.

        >>> print(StorageError.of("runs/cope", "No space left on device"))
        cannot write to runs/cope (No space left on device): complete files are intact; free space and rerun the command
        """
        read_only = reason == os.strerror(errno.EROFS)
        mend = "choose a folder that can be written to" if read_only else "free space"
        return cls(
            f"cannot write to {path} ({reason}): complete files are intact; {mend} and rerun the command"
        )


class Interrupted(Exception):
    """The run was asked to stop, saved a checkpoint, and stopped; the same command resumes the run.

    Attributes:
      exit_code: 128 + the number of the signal, as in shells: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, message: str, number: int = signal.SIGINT):
        super().__init__(message)
        self.exit_code = 128 + number


def not_installed(error: ModuleNotFoundError) -> str | None:
    """The line for a module of an extra that is not installed, None for other modules.

    >>> not_installed(ModuleNotFoundError(name="grain.python"))
    "grain is not installed: pip install 'cope-jax[lab]'"
    """
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return extra and f"{module} is not installed: pip install 'cope-jax[{extra}]'"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    return next(iter(str(error).splitlines() or [type(error).__name__]))


@contextlib.contextmanager
def clear_storage_errors(path: object) -> Iterator[None]:
    """Turns an error of a full or read-only disk into a StorageError that names `path`."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        raise StorageError.of(path, reason) from error


def storage_reason(error: BaseException | None) -> str | None:
    """The file system's message if a full or read-only disk caused the exception, else None.

    Libraries in C++ and Rust raise their own exceptions, whose text contains the error number.

    >>> storage_reason(OSError(errno.ENOSPC, "cannot write"))
    'No space left on device'
    >>> storage_reason(ValueError("UNKNOWN: cannot write x/0 [os_error_code='30']"))
    'Read-only file system'
    >>> storage_reason(ValueError("I/O error: No space left on device (os error 28)"))
    'No space left on device'
    >>> storage_reason(RuntimeError("write() failed: No space left on device; writing x"))
    'No space left on device'
    >>> storage_reason(ValueError("no space between words")) is None
    True
    """
    reasons = {os.strerror(number): number for number in STORAGE_ERRNOS}
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (
            named := re.search(r"os_error_code='(\d+)'|\(os error (\d+)\)", str(error))
        ):
            number = int(named[1] or named[2])
        elif number is None and (named := re.search(r"\(\) failed: ([^;]+)", str(error))):
            number = reasons.get(named[1])
        if number in STORAGE_ERRNOS:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def bucket_error(error: BaseException | None) -> StorageError | ConfigError | None:
    """A clear error if a library for buckets caused the exception or is missing, else None.

    >>> bucket_error(ValueError("another error")) is None
    True
    """
    while error is not None:
        if isinstance(error, ImportError) and (missing := re.search("gcsfs|s3fs", str(error))):
            return ConfigError(
                f"{missing[0]}, which reads buckets, is not installed: pip install 'cope-jax[buckets]'"
            )
        if type(error).__module__.partition(".")[0] in _BUCKET_LIBRARIES:
            return StorageError(
                f"a bucket cannot be used now ({first_line(error)}): what is stored is intact; check the network and "
                "the credentials, and rerun the command"
            )
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discards stderr, where libraries print errors that they also raise, and other messages."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
