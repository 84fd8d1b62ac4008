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

    JAX's own settings, such as JAX_COMPILATION_CACHE_DIR, take precedence. Each kind of CPU has its
    own folder, because a program for another CPU may end with an illegal instruction. In a folder
    that another user could change, nothing is kept, because programs are run, and a line says so,
    also for the C++ library for attention, which lies there too.
    """
    folder = cache_folder()
    if folder is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        path = folder / "programs" / kind_of_cpu()
        with contextlib.suppress(OSError):  # it cannot be created
            if reason := private_folder(path):
                print(
                    f"warning: {reason}, so no compiled programs are kept, and attention runs without its C++ library: "
                    "remove their access, or set XDG_CACHE_HOME to a folder of your own",
                    file=sys.stderr,
                )
            else:
                jax.config.update("jax_compilation_cache_dir", str(path))
                os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)  # for processes that this one starts


def kind_of_cpu() -> str:
    """A name for what the CPU can do: its architecture and, on Linux, a digest of its model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
