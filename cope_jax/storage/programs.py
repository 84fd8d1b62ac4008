"""Keeps compiled programs in the user's cache folder."""

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

from cope_jax.storage.files import cache_folder, private_folder


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder, so that the next command starts sooner.

    JAX's settings, such as JAX_COMPILATION_CACHE_DIR, take precedence. Each kind of CPU has a
    folder: a program for another CPU may end with an illegal instruction. If another user could
    change the folder, nothing is kept, and a warning says so. The folder also holds the C++ library
    for attention.
    """
    folder = cache_folder()
    if folder is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        path = folder / "programs" / kind_of_cpu()
        with contextlib.suppress(OSError):  # it cannot be created
            if reason := private_folder(path):
                print(
                    f"warning: {reason}, so no compiled programs are kept, and attention runs without its C++ library: "
                    "remove their access, or set XDG_CACHE_HOME to a folder that only you can change",
                    file=sys.stderr,
                )
            else:
                jax.config.update("jax_compilation_cache_dir", str(path))
                # For processes that this one starts.
                os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)


def kind_of_cpu() -> str:
    """A name for this kind of CPU: its architecture and, on Linux, a digest of model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    starts = ("model name", "flags", "Features", "CPU part")
    facts = sorted({line for line in lines if line.startswith(starts)})
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
