"""On what was measured: libraries, processor, memory, settings and load."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from cope_jax.runs.records import Record, environment
from experiments.benchmarks import process
from experiments.benchmarks.problem import cores, free_memory, gibibytes


def facts() -> Record:
    """All that the figures depend on beside the code; `load_average` is that of before."""
    found = environment()
    for name in ("torch", "x-transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {
        **found,
        "processor": _processor(),
        "cores": cores(),
        "free_memory": f"{gibibytes(free_memory())} GiB",
        "process": process.describe(),
        "load_average": os.getloadavg()[0],
        "flags": " ".join(sys.argv[1:]),
    }


def warnings(found: Record) -> list[str]:
    """What speaks against the figures.

    >>> warnings({"load_average": 3.21, "cores": 2})
    ['the machine was busy before (load 3.2 on 2 cores): do not trust these times']
    >>> warnings({"load_average": 0.5, "cores": 2})
    []
    """
    load, own = found["load_average"], found["cores"]
    if load <= own / 2:
        return []
    return [f"the machine was busy before (load {load:.1f} on {own} cores): do not trust these times"]


def _processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
