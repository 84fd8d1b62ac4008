"""Compiles the C++ attention of this package once for this machine, and loads it.

The library lies in the user's cache folder (`$XDG_CACHE_HOME/cope_jax`, by default
`~/.cache/cope_jax`). If another user could change this folder, it is not used, because what lies
there is run. The library's name contains a digest of the source, of jaxlib's version, and of what
the compiler knows about itself and the CPU. So every version, compiler and CPU has its own file.
Without the library, attention runs in XLA; this is an error only if `COPE_JAX_NATIVE=required`.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.storage.files import cache_folder, exposed, private_folder, write_atomically
from cope_jax.storage.locks import open_lock, try_lock, unfinished

SETTING = "COPE_JAX_NATIVE"
MODES = ("0", "1", "required")
SECONDS = 60  # the longest time to compile, or to wait for a process that compiles
QUIET = 1.5  # seconds of compiling, or of the check that follows, without a word
CHECKING = 4 * SECONDS  # the longest time of the check, which compiles two kernels
SOURCES = Path(__file__).parent
CALL = "Generate"
WRONG = 3  # the status of `check` if the numbers differ
# -ffp-contract: multiply and add in one instruction. Apple's compiler has no -march=native for ARM.
MARCH = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
COMMON_FLAGS = [MARCH, "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC"]
FLAGS = [*COMMON_FLAGS, "-O1"]  # of the library, which only hands on work
KERNEL_FLAGS = [*COMMON_FLAGS, "-O3", "-fno-math-errno", f"-I{SOURCES}"]  # of generated kernels
UNCOMPILED = "cannot be compiled"  # in the reason why there is no kernel
VECTORS = (b"__AVX2__", b"__ARM_NEON")  # macros of the CPUs that the library supports


class Unavailable(Exception):
    """The library cannot be compiled or loaded; the message says why."""


def why_not() -> str | None:
    """Returns why the library cannot be used on this machine; None if it can, and then it is
    loaded.

    Raises:
      ConfigError: `COPE_JAX_NATIVE` is not 0, 1 or required, or it is required and the library
        cannot be used.
    """
    mode = os.environ.get(SETTING, "1")
    if mode not in MODES:
        raise ConfigError(f"{SETTING}={mode!r} is unknown: choose from {', '.join(MODES)}")
    if mode == "0":
        return f"{SETTING} is 0"
    reason = _load()
    check_required(reason)
    return reason


def check_required(reason: str | None) -> None:
    """Raises ConfigError if C++ is required and cannot be used for this reason."""
    if reason is not None and os.environ.get(SETTING) == "required":
        raise ConfigError(
            f"{SETTING}=required, but {reason}: set it to 1 to run without the C++ library"
        )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def target() -> str:
    """The name of the custom call; it changes with the source, so a cached program finds the code it
    was made for.
    """
    return f"cope_jax_{CALL.lower()}_{_digest(_sources())[:12]}"


@functools.cache
def _load() -> str | None:
    """Compiles the library if necessary, and registers its custom call.

    Returns why this is not possible, or None.
    """
    try:
        path = _compiled()
        ctypes.CDLL(str(path))  # says more than `_check` about what is no library
        _check(path)
        register(path)
    except (
        Unavailable,
        OSError,
        AttributeError,
        RuntimeError,
    ) as error:  # the last two: of loading and registering
        return f"the C++ library for attention is not available ({str(error).splitlines()[0]})"
    return None


@contextlib.contextmanager
def _announced(folder: Path) -> Iterator[None]:
    """Says, once, that something is compiled if that takes longer than `QUIET`."""
    timer = threading.Timer(QUIET, _announce, [folder])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _announce(folder: Path) -> None:
    logging.getLogger("cope_jax").warning(
        "attention: compiling a kernel in C++, kept in %s", folder
    )


def call(digest: str, shapes: Any, *arrays: Array) -> Any:
    """Runs the kernel with this digest; with `jax.vmap`, once for each entry."""
    return jax.ffi.ffi_call(target(), shapes, vmap_method="sequential")(*arrays, digest=digest)


@functools.cache
def has_tiles() -> bool:
    """Returns whether the CPU has a matrix unit for bfloat16 (AMX) that this process may use and that
    multiplies right; the library can be used.
    """
    path = _compiled()
    return _symbol(path, "allow_tiles") and _symbol(path, "tiles_agree")


def _symbol(path: Path, name: str) -> bool:
    """Calls a function without arguments of a compiled library, which returns a condition."""
    function = getattr(ctypes.CDLL(str(path)), name)
    function.restype = ctypes.c_bool
    return function()


def digest_of(text: str) -> str:
    """The digest by which `call` finds a generated kernel that is loaded."""
    return _digest(_sources(), text.encode(), repr(KERNEL_FLAGS).encode())[:24]


def load_kernel(text: str) -> None:
    """Compiles and loads a generated kernel, once.

    Raises:
      Unavailable: it cannot be compiled or loaded.
    """
    if (reason := _load_kernel(text, digest_of(text))) is not None:
        raise Unavailable(reason)


@functools.cache
def _load_kernel(text: str, digest: str) -> str | None:
    try:
        kernel = ctypes.CDLL(str(_compiled(text)))
        library = ctypes.CDLL(str(_compiled()))
        library.add_kernel(digest.encode(), ctypes.cast(kernel.run_kernel, ctypes.c_void_p))
    except (Unavailable, OSError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None


def register(path: Path) -> None:
    """Registers the custom call of a compiled library."""
    call = getattr(ctypes.CDLL(str(path)), CALL)
    jax.ffi.register_ffi_target(target(), jax.ffi.pycapsule(call), platform="cpu")


def _compiled(text: str | None = None) -> Path:
    """The path of the library, or of a generated kernel, in the cache. It is compiled first if it is
    missing or damaged.
    """
    compilers = [words for words in _compilers() if shutil.which(words[0])]
    if not compilers:
        chosen = os.environ.get("CXX")
        missing = f"CXX={chosen!r} is not found" if chosen else "there is no C++ compiler"
        raise Unavailable(f"{missing}: install g++ or clang++, or set CXX")
    folder = cache_folder()
    if folder is None:
        raise Unavailable("there is no home folder: set XDG_CACHE_HOME")
    if reason := private_folder(folder):
        raise Unavailable(reason)
    for compiler in compilers[:-1]:
        with contextlib.suppress(Unavailable):
            return _compiled_with(compiler, folder, text)
    return _compiled_with(compilers[-1], folder, text)


def _compiled_with(compiler: list[str], folder: Path, text: str | None) -> Path:
    command = [*compiler, *(FLAGS if text is None else KERNEL_FLAGS)]
    # The predefined macros name the compiler, its version, and what the CPU can do.
    macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    if not any(macro in macros for macro in VECTORS):
        raise Unavailable("the CPU has neither AVX2 nor NEON")
    facts = [
        _sources(),
        (text or "").encode(),
        importlib.metadata.version("jaxlib").encode(),
        " ".join(command).encode(),
        macros,
    ]
    name = "attention" if text is None else "kernel"
    path = folder / f"{name}-{_digest(*facts)[:24]}.so"
    if _is_whole(path):
        return path
    with open_lock(path.with_suffix(".lock")) as lock:
        _wait_for(lock)
        if not _is_whole(path):  # another process may have compiled it while we waited
            with _announced(folder):
                _compile(command, path, text)
    return path


def _compile(command: list[str], path: Path, text: str | None = None) -> None:
    with unfinished(path.parent) as folder:
        made, source = folder / path.name, SOURCES / "attention.cc"
        if text is not None:
            source = folder / "kernel.cc"
            source.write_text(text)
        include = ["-isystem", jax.ffi.include_dir()]
        _run([*command, *include, str(source), "-o", str(made)])
        for verdict in path.parent.glob(f"{path.stem}.*.checked"):
            verdict.unlink()
        path.with_suffix(".sha256").write_text(_digest(made.read_bytes()))
        made.chmod(0o700)
        made.replace(path)


def _check(path: Path) -> None:
    """Solves a small problem, once for this package, in a process of its own, because what a faulty
    compiler makes may crash.
    """
    printers = (module.read_bytes() for module in sorted(SOURCES.parent.rglob("*.py")))
    verdict = path.with_suffix(f".{_digest(*printers)[:12]}.checked")
    if verdict.exists():
        reason = verdict.read_text()
    else:
        with _announced(path.parent):
            reason = _fault(path)
        with contextlib.suppress(OSError):  # a folder that cannot be written to
            write_atomically(verdict, reason)
    if reason:
        raise Unavailable(reason)


def _fault(path: Path) -> str:
    """Returns what is wrong with the library; "" if nothing is.

    Raises:
      Unavailable: the check could not be made, for a reason that may pass.
    """
    command = [sys.executable, "-m", f"{__package__}.check", str(path)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_TRACEBACK_FILTERING": "off",  # else the last line is about the filter
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECKING, env=environment)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"a small problem took longer than {CHECKING} seconds") from None
    if done.returncode == WRONG:
        return "a compiled kernel gives wrong numbers: try another compiler in CXX"
    if done.returncode < 0:
        return f"a compiled kernel fails at a small problem, with status {done.returncode}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise Unavailable(
            f"a small problem cannot be solved: {lines[-1] if lines else 'no reason'}"
        )
    return ""


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=SECONDS).stdout
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} took longer than {SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        lines = (
            line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line
        )
        raise Unavailable(next(lines, f"{Path(command[0]).name} failed")) from None


def _wait_for(lock: IO[str]) -> None:
    end = time.monotonic() + SECONDS
    while not try_lock(lock):
        if time.monotonic() > end:
            raise Unavailable(f"another process has been compiling it for {SECONDS} seconds")
        time.sleep(0.1)


def _is_whole(path: Path) -> bool:
    """Returns whether the file is what this user compiled.

    A damaged library can crash the process.
    """
    try:
        return not exposed(path) and path.with_suffix(".sha256").read_text() == _digest(
            path.read_bytes()
        )
    except (OSError, UnicodeDecodeError):
        return False


def _compilers() -> list[list[str]]:
    """The command of each compiler to try, in words."""
    chosen = os.environ.get("CXX")
    try:
        words = shlex.split(chosen or "")
    except ValueError:  # a quote that does not end
        raise Unavailable(f"CXX={chosen!r} cannot be read") from None
    return [words] if words else [["g++"], ["clang++"], ["c++"]]


@functools.cache
def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*")))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
