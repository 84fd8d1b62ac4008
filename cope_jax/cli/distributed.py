"""Defines the flags of `train` and `compare` for several processes, and connects these."""

import os
import re
import sys
import threading
from typing import Any

from absl import flags

from cope_jax.errors import ConfigError

SECONDS = 300.0
"""The time to find each other, such as while a node still pulls the job's container."""

_DISTRIBUTED = flags.DEFINE_enum(
    "distributed",
    "auto",
    ["auto", "on", "off"],
    "Whether this process is one of several that train together, one per host or device. on: JAX finds the other "
    "processes (on Cloud TPU, GKE, Slurm or Open MPI). off: this process trains alone. auto: on if srun, Open MPI "
    "or GKE started more than one process, otherwise off.",
)
flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of the first process; only together with --num_processes and --process_id. Without this flag, JAX finds "
    "the address.",
)
flags.DEFINE_integer(
    "num_processes",
    None,
    "Number of processes of the run; only together with --coordinator. Without this flag, JAX finds the number.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "process_id",
    None,
    "Index of this process, from 0; only together with --coordinator. Without this flag, JAX finds the index.",
    lower_bound=0,
)


def join() -> None:
    """Connects this process to the other processes of the run, if there are any. Call it before JAX
    looks for devices.

    If the other processes are not found within `SECONDS`, this process exits with status 134, as
    JAX does if it loses a process. The other processes may only be late, so the same command can be
    run again. Raises ConfigError for incomplete flags.
    """
    names = ("coordinator", "num_processes", "process_id")
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    explicit = any(value is not None for value in given.values())
    if explicit and None in given.values():
        raise ConfigError(
            "--coordinator, --num_processes and --process_id belong together: give all three, or none"
        )
    address = re.fullmatch(r".+:([0-9]{1,5})", given["coordinator"]) if explicit else None
    if explicit and (address is None or not 0 < int(address[1]) < 2**16):
        address_text = given["coordinator"]
        raise ConfigError(
            f"--coordinator={address_text} must be HOST:PORT with a port below 65536, such as 10.0.0.2:1234"
        )
    if explicit and given["process_id"] >= given["num_processes"]:
        raise ConfigError(
            "--process_id={process_id} must be less than --num_processes={num_processes}".format(
                **given
            )
        )
    if not explicit and not (
        _DISTRIBUTED.value == "on" or (_DISTRIBUTED.value == "auto" and several())
    ):
        return
    import jax  # here, because --help does not need it

    # Before JAX, which aborts with a trace.
    late = threading.Timer(SECONDS, _leave, (f"after {SECONDS:.0f} s",))
    late.daemon = True
    late.start()
    try:
        host, count, index = given.values()
        jax.distributed.initialize(host, count, index, initialization_timeout=int(SECONDS) + 60)
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        if "RPC server" in reason:
            address_text = given["coordinator"] or "the first process"
            raise ConfigError(
                f"{address_text} cannot be opened ({reason}): choose a free port for --coordinator"
            ) from error
        _leave(reason)
    finally:
        late.cancel()


def _leave(reason: str) -> None:
    print(
        f"error: the processes did not find each other ({reason}): start all of them, or give --coordinator, "
        "--num_processes and --process_id; for a single process, give --distributed=off",
        file=sys.stderr,
        flush=True,
    )
    os._exit(134)  # an orderly exit would wait for JAX's connection


def several() -> bool:
    """True if environment variables show that this is one of several processes."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    counts = (os.environ.get(name, "1") for name in names)
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return "," in hosts or any(count.isdigit() and int(count) > 1 for count in counts)
