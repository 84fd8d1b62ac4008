"""Sets up the process for comparable times, and describes the process and the machine.

- glibc's allocator returns each big block to the system when it is freed, and each new block then
  costs a page fault for every 4 KiB. PyTorch allocates each intermediate array separately, which
  makes PyTorch several times slower at great lengths; XLA allocates once for each call. So every
  contender is measured with an allocator that keeps its blocks.
- PyTorch's threads spin while they wait for each other. If other programs or another library's
  threads need the cores too, spinning costs several times as much as the work of the threads. So
  idle threads sleep.
- One CPU device of XLA uses little more than one core (docs/attention.md). So a CPU is split into
  one device for each core, with one thread per device, and JAX's work is split over the devices.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from cope_jax.errors import ConfigError
from cope_jax.runs.records import Record, environment
from tools.benchmark.workloads import cores, free_memory

_ALLOCATOR = {
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**46),
    "MALLOC_MMAP_THRESHOLD_": str(2**46),
}
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def restart(arguments: Sequence[str], devices: int = 1) -> None:
    """Restarts Python with these arguments and with this module's settings, which take effect only
    at startup.

    The function sets only what the user has not set, and does nothing if nothing is left to set, as
    after a restart. It tunes only glibc's allocator, and only if LD_PRELOAD is not set. It splits a
    CPU into `devices` devices unless JAX_PLATFORMS names another platform. Without JAX_PLATFORMS,
    JAX still uses an accelerator if there is one.
    """
    plain = _is_glibc() and not os.environ.get("LD_PRELOAD")
    settings = {**_THREADS, **(_ALLOCATOR if plain else {})}
    missing = {name: value for name, value in settings.items() if name not in os.environ}
    flags = os.environ.get("XLA_FLAGS", "")
    on_cpu = os.environ.get("JAX_PLATFORMS", "").partition(",")[0] in ("", "cpu")
    if devices > 1 and on_cpu and _DEVICE_COUNT not in flags:
        missing["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={devices} {_ONE_THREAD}".strip()
    if missing:
        os.execve(sys.executable, [sys.executable, *arguments], os.environ | missing)


def choose(asked: int) -> int:
    """The number of JAX devices that share the work: `asked`, or all if `asked` is 0.

    Raises:
      ConfigError: JAX has fewer devices.
    """
    available = jax.device_count()
    if asked > available:
        raise ConfigError(
            f"--devices={asked}, but JAX has {available} devices: ask for fewer, or check XLA_FLAGS"
        )
    return asked or available


def untuned(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without the settings of the allocator, for measuring memory."""
    return {name: value for name, value in environment.items() if name not in _ALLOCATOR}


def describe(environment: Mapping[str, str] = os.environ) -> str:
    """Describes the allocator and the threads of this process in one line, for the report.

    >>> describe({"LD_PRELOAD": "libjemalloc.so", "OMP_WAIT_POLICY": "ACTIVE"})
    'LD_PRELOAD=libjemalloc.so; OMP_WAIT_POLICY=ACTIVE; XLA_FLAGS=unset; allocator not tuned'
    """
    tuned = " ".join(f"{name}={environment[name]}" for name in _ALLOCATOR if name in environment)
    names = ("LD_PRELOAD", *_THREADS, "XLA_FLAGS")
    settings = [f"{name}={environment.get(name, 'unset')}" for name in names]
    return "; ".join([*settings, f"allocator tuned, {tuned}" if tuned else "allocator not tuned"])


def facts() -> Record:
    """Everything that the results depend on, except the code.

    `load_average` is measured before the benchmark.
    """
    packages = importlib.metadata.distributions()
    installed = {package.name.lower(): package.version for package in packages}
    return {
        **environment(),
        **{name: installed.get(name) for name in ("torch", "x-transformers")},
        "processor": _processor(),
        "cores": cores(),
        "free_memory": f"{free_memory() / 2**30:.1f} GiB",
        "process": describe(),
        "load_average": os.getloadavg()[0],
        "flags": " ".join(sys.argv[1:]),
    }


def warnings(facts: Record) -> list[str]:
    """Reasons not to trust the results.

    >>> warnings({"load_average": 3.21, "cpu_count": 2})
    ['the machine was busy at the start (load 3.2, and it has 2 cores): do not trust these times']
    >>> warnings({"load_average": 0.5, "cpu_count": 2})
    []
    """
    load, machine = facts["load_average"], facts["cpu_count"] or 1
    busy = f"the machine was busy at the start (load {load:.1f}, and it has {machine} cores)"
    return [f"{busy}: do not trust these times"] if load > machine / 2 else []


def _processor() -> str:
    """The name of the processor, if the system reports it."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    line = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return line[1] if line else platform.processor()


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
