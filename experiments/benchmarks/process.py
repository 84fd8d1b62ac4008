"""How this process is set up, which decides more than it should.

- glibc's allocator returns each big block to the system when it is freed, and the next one costs a page fault for every
  4 KiB. PyTorch allocates each intermediate array anew and is several times slower for it at great lengths; XLA
  allocates once for each call. So everybody is measured with an allocator that keeps its blocks.
- PyTorch's threads spin while they wait for each other. Where other programs want the cores too, or another library's
  threads have their turn, that costs them a multiple of their own work. So idle threads sleep.
- XLA runs the operations of a program one after another on a CPU, and hardly splits a small one over threads: one
  device uses little more than one core. So a CPU is made one device for each core, with one thread each, and JAX's work
  is split over them.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence

_ALLOCATOR = {
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**46),
    "MALLOC_MMAP_THRESHOLD_": str(2**46),
}
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def restart(arguments: Sequence[str], devices: int = 1) -> None:
    """Starts this process anew with these arguments and this module's settings, which libraries read when they start.

    What the user has set stays. It does nothing in a process that has been started so, or where nothing can be set: a
    replaced allocator, or one that is not glibc's; a JAX_PLATFORMS other than the CPU.

    Args:
      arguments: of Python.
      devices: what a CPU is made. Without JAX_PLATFORMS and with an accelerator, JAX takes that, as it always does.
    """
    plain = _is_glibc() and not os.environ.get("LD_PRELOAD")
    settings = {**_THREADS, **(_ALLOCATOR if plain else {})}
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    missing |= _split_cpu(os.environ, devices)
    if missing:
        os.execve(sys.executable, [sys.executable, *arguments], os.environ | missing)


def _split_cpu(environment: Mapping[str, str], devices: int) -> dict[str, str]:
    own = environment.get("XLA_FLAGS", "")
    platform = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if devices == 1 or _DEVICE_COUNT in own or platform not in ("", "cpu"):
        return {}
    return {"XLA_FLAGS": f"{own} {_DEVICE_COUNT}={devices} {_ONE_THREAD}".strip()}


def describe(environment: Mapping[str, str] = os.environ) -> str:
    """One line about the allocator and the threads of this process, for the report.

    >>> describe({"LD_PRELOAD": "libjemalloc.so", "OMP_WAIT_POLICY": "ACTIVE"})
    'allocator replaced by libjemalloc.so; OMP_WAIT_POLICY=ACTIVE; XLA_FLAGS=unset'
    """
    tuned = " ".join(f"{name}={environment[name]}" for name in _ALLOCATOR if name in environment)
    if environment.get("LD_PRELOAD"):
        allocator = f"allocator replaced by {environment['LD_PRELOAD']}"
    elif not _is_glibc():
        allocator = "allocator not glibc's, not tuned"
    elif tuned:
        allocator = f"glibc's allocator tuned, {tuned}"
    else:
        allocator = "glibc's allocator as it is, which slows PyTorch down at great lengths"
    others = (f"{name}={environment.get(name, 'unset')}" for name in (*_THREADS, "XLA_FLAGS"))
    return "; ".join([allocator, *others])


def untuned(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment with the allocator as it is, with which memory is measured."""
    return {name: value for name, value in environment.items() if name not in _ALLOCATOR}


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
