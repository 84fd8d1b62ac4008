"""Flags for runs of several processes: how the processes find each other."""

import os
import re
import sys
from typing import Any

import jax
from absl import flags

from cope_jax.errors import ConfigError

_DISTRIBUTED = flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "Run as one of several processes, one per host or device. on: JAX finds the others, on Cloud TPU, GKE, Slurm and "
    "Open MPI; auto: on if Slurm's srun, Open MPI or GKE started more than one.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of the first process, if JAX cannot find it; with --num_processes, --process_id."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)


def join() -> None:
    """Connects this process to the others, if there are any, before anything asks for devices.

    If they are not found, exits with status 134, as JAX does in a process that loses the others: they may only be late,
    so the same command can be tried again. Raises ConfigError for incomplete flags.
    """
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in ("coordinator", "num_processes", "process_id")}
    explicit = any(value is not None for value in given.values())
    if explicit and None in given.values():
        raise ConfigError("--coordinator, --num_processes and --process_id belong together: give all three, or none")
    if explicit and not re.fullmatch(r".+:[0-9]+", given["coordinator"]):
        raise ConfigError("--coordinator={coordinator} must be HOST:PORT".format(**given))
    if explicit and given["process_id"] >= given["num_processes"]:
        raise ConfigError("--process_id={process_id} must be less than --num_processes={num_processes}".format(**given))
    if not explicit and not (_DISTRIBUTED.value == "on" or (_DISTRIBUTED.value == "auto" and several())):
        return
    try:
        jax.distributed.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        print(
            f"error: the processes did not find each other ({reason}): start all of them, or give --coordinator, "
            f"--num_processes and --process_id, or --distributed=off for a single process",
            file=sys.stderr,
        )
        sys.exit(134)


def several() -> bool:
    """Whether the environment says that this is one of several processes."""
    counts = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return "," in hosts or any(count.isdigit() and int(count) > 1 for count in counts)
