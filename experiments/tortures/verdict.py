"""Whether two runs ended the same, to the last bit."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.training import from_config
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.program import Program
from cope_jax.typing import PyTree
from experiments.tortures.config import get_config


@functools.cache
def read_config() -> ExperimentConfig:
    """The config of the run that is killed."""
    return ExperimentConfig.from_mapping(get_config().to_dict())


@functools.cache
def _program() -> Program:
    config = read_config()
    task = tasks.create(config.task.name, **config.task.options)
    return from_config.create_program(config, task, devices=jax.devices()[:1])


def differences(straight: Path, tortured: Path) -> list[str]:
    """What differs between the ends of two runs, a line each; none if all is equal to the last bit.

    Compared are every leaf of the state in the last checkpoint, the places in the data, `metrics.jsonl` byte by byte,
    and the records of `result.json` without their wall time.

    Args:
      straight: workdir of the run that was left in peace.
      tortured: workdir of the other.
    """
    ours, theirs = _end(tortured), _end(straight)
    found = [f"{name} differs" for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    lines, wanted = ((folder / "metrics.jsonl").read_bytes().splitlines(True) for folder in (tortured, straight))
    for number in range(max(len(lines), len(wanted))):
        if lines[number : number + 1] != wanted[number : number + 1]:
            return [*found, f"metrics.jsonl differs from line {number + 1} on"]
    return found


def _end(workdir: Path) -> dict[str, Any]:
    """What a run ended with, by name."""
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(_program().state_shapes())
    if restored is None:
        raise ConfigError(f"{workdir} has no checkpoint: delete it, and the command makes it anew")
    step, state, progress = restored
    records = json.loads((workdir / "result.json").read_text())["records"]
    plain = [{name: record[name] for name in record.keys() - {"wall_seconds"}} for record in records]
    return {"last checkpoint": step, "place in the data": progress["data"], "result.json": plain, **bits(state)}


def bits(tree: PyTree) -> dict[str, tuple[Any, ...]]:
    """Type, shape and bytes of each leaf by its name: equal if and only if the trees are, to the last bit.

    >>> bits({"a": np.float32(0.0)}) == bits({"a": np.float32(-0.0)})
    False
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found[name] = (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
    return found
