"""Bodies of processes of tests of faults: `python -m tests.training.faulty NAME ARGUMENT…`."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cope_jax.errors import StorageError
from cope_jax.storage import checksum
from cope_jax.storage.checkpoints import Checkpoints

PROGRESS = {"data": [{"next_index": 7}], "seconds": 0.5}


def create(seed):
    # 200 KiB; numbers that do not depend on the sharding.
    kernel = jax.random.bits(jax.random.key(seed), (128, 400))
    return {"step": jnp.int32(seed), "params": {"kernel": kernel}, "key": jax.random.key(seed)}


def like(mesh=None):
    split = {"step": P(), "params": {"kernel": P("data")}, "key": P()}

    def described(leaf, spec):
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(described, jax.eval_shape(lambda: create(0)), split)


def mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(seed):
    return jax.jit(
        lambda: create(seed), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like(mesh()))
    )()


def fill(folder):
    """Saves until the disk is full, and says what can be read then."""
    folder = Path(folder)
    message = None
    try:
        with Checkpoints(folder / "checkpoints", keep=99) as checkpoints:
            for step in range(2, 40, 2):
                checkpoints.save(step, create(step), PROGRESS)
    except StorageError as error:
        message = str(error)
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        step, state, _ = checkpoints.restore(like())
        whole = checksum.of_arrays(state) == checksum.of_arrays(create(step))
        print(
            json.dumps(
                {"message": message, "steps": checkpoints.steps(), "restored": step, "whole": whole}
            )
        )


def small_files(folder):
    """As `fill`, with a largest size of a file."""
    with Checkpoints(Path(folder) / "checkpoints") as checkpoints:
        checkpoints.save(1, create(1), PROGRESS)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, resource.RLIM_INFINITY))
    fill(folder)


def fill_metrics(folder):
    """Writes metrics until the disk is full, and says what can be read then."""
    from cope_jax.training.metrics import MetricsWriter, read_metrics

    message = None
    written = 0
    try:
        with MetricsWriter(Path(folder), 0) as metrics:
            for step in range(1, 100_000):
                metrics.write([{"step": step, "seed": 0, "loss": 0.1}])
                written = step
    except StorageError as error:
        message = str(error)
    print(
        json.dumps(
            {
                "message": message,
                "written": written,
                "read": len(read_metrics(Path(folder, "metrics.jsonl"))),
            }
        )
    )


def join(port, count, index):
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    assert jax.process_count() == int(count)


def save_together(folder, *join_arguments):
    join(*join_arguments)
    with Checkpoints(Path(folder)) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, sharded(step), PROGRESS)


def restore_together(folder, *join_arguments):
    """Goes on from what is there, and saves again at the same step and the next."""
    join(*join_arguments)
    with Checkpoints(Path(folder)) as checkpoints:
        step, state, progress = checkpoints.restore(like(mesh()))
        print(
            json.dumps(
                {"step": step, "fingerprint": checksum.of_arrays(state), "progress": progress}
            )
        )
        checkpoints.save(4, sharded(4), PROGRESS)
        checkpoints.save(6, sharded(6), PROGRESS)


def fail_in_second(folder, *join_arguments):
    """The second process cannot read the newest checkpoint, which the first can."""
    join(*join_arguments)
    if jax.process_index() == 1:
        from cope_jax.storage import checkpoint_folder

        loads = checkpoint_folder.ocp.load_checkpointables

        def load(path, like):
            if path.name == "4":
                raise OSError("stale file handle")
            return loads(path, like)

        checkpoint_folder.ocp.load_checkpointables = load
    with Checkpoints(Path(folder)) as checkpoints:
        step, state, _ = checkpoints.restore(like(mesh()))
        print(
            json.dumps(
                {
                    "step": step,
                    "fingerprint": checksum.of_arrays(state),
                    "left": checkpoints.steps(),
                }
            )
        )


def fill_together(folder, *join_arguments):
    from cope_jax.cli import exits

    join(*join_arguments)
    with (
        exits.no_late_words(),
        exits.clear_errors(),
        Checkpoints(Path(folder) / "checkpoints", keep=99) as checkpoints,
    ):
        for step in range(2, 40, 2):
            checkpoints.save(step, sharded(step), PROGRESS)


def pair(name, folder, port):
    """Two processes in one view of the file system, and how each ended."""
    command = [sys.executable, "-m", "tests.training.faulty", name, folder, port, "2"]
    both = [
        subprocess.Popen([*command, index], stderr=subprocess.PIPE, text=True) for index in "01"
    ]
    ended = [(process.communicate()[1], process.returncode) for process in both]
    print(json.dumps([{"status": status, "error": error} for error, status in ended]), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
