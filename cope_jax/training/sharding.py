"""Maps the axes of arrays to the axes of the mesh that split them: one table, applied to the training state."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax.array_types import PyTree
from cope_jax.errors import ConfigError
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import Layout
from cope_jax.training.experiment_config import MeshConfig

# From least to most communication: devices along the last axes are neighbours.
AXES = ("data", "fsdp", "sequence", "tensor")

# The logical axes that parameters name (`nnx.Param(..., axes=...)`). Others, such as layers and seeds, are not split.
RULES = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
# The data decide their sizes: they are not split if they cannot be split evenly.
IF_EVEN = frozenset({"vocab"})
# Activations, in the names of `Layout`.
BATCH, LENGTH, WIDTH = ("data", "fsdp"), "sequence", "tensor"


def create_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config`, of all devices; a single process may ask for fewer and uses the first ones.

    >>> create_mesh(MeshConfig(data=1)).shape["fsdp"]
    1

    Raises:
      ConfigError: the number of devices does not fit the config.
    """
    found = list(jax.devices() if devices is None else devices)
    sizes = dataclasses.asdict(config)
    named = math.prod(size for size in sizes.values() if size != -1)
    rest = [name for name, size in sizes.items() if size == -1]
    text = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if rest and len(found) % named:
        raise ConfigError(f"job.mesh {text}: {len(found)} devices cannot be split evenly by {named}")
    sizes |= {name: len(found) // named for name in rest}
    asked = math.prod(sizes.values())
    if asked > len(found):
        raise ConfigError(f"job.mesh {text} asks for {asked} devices, but there are {len(found)}")
    processes = {device.process_index for device in found}
    if asked < len(found) and len(processes) > 1:
        raise ConfigError(
            f"job.mesh {text} uses {asked} of {len(found)} devices: several processes must use all, set one axis to -1"
        )
    return jax.make_mesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=found[:asked]
    )


def layout_of(mesh: Mesh) -> Layout:
    """How activations are split over a mesh; axes of a single device split nothing."""

    def used(axis: str) -> str | None:
        return axis if mesh.shape[axis] > 1 else None

    return Layout(tuple(axis for axis in BATCH if used(axis)), used(LENGTH), used(WIDTH))


def check_sizes(mesh: Mesh, block: BlockConfig | None, batch_sizes: Mapping[str, int]) -> None:
    """Raises ConfigError if the mesh cannot evenly split batches, given by the name of their field, or heads."""
    rows = math.prod(mesh.shape[axis] for axis in BATCH)
    for name, size in batch_sizes.items():
        if size % rows:
            raise ConfigError(
                f"{name}={size} cannot be split evenly over the {rows} devices of job.mesh data × fsdp: "
                f"make it a multiple, or set --config.job.mesh.data"
            )
    if block is None:
        return
    shape = block.attention_shape(None)
    for name, heads in (("num_heads", shape.num_heads), ("num_kv_heads", shape.kv_heads)):
        if heads % mesh.shape[WIDTH]:
            raise ConfigError(f"model.block.{name}={heads} must be a multiple of job.mesh.tensor={mesh.shape[WIDTH]}")


def spec_of(name: str, shape: Sequence[int], axes: Sequence[str | None], sizes: Mapping[str, int]) -> PartitionSpec:
    """How a parameter with these logical axes is split; axes before the named ones are not split.

    >>> spec_of("kernel", (12, 64, 256), ("embed", "mlp"), {"fsdp": 2, "tensor": 4})
    P(None, 'fsdp', 'tensor')

    Raises:
      ConfigError: a size is not a multiple of its mesh axis.
      ValueError: the table maps two axes to one mesh axis, or does not have an axis.
    """
    entries: list[str | None] = [None] * (len(shape) - len(axes))
    for axis, size in zip(axes, shape[len(entries) :], strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(f"{name}: the logical axis {axis!r} is not in RULES, which has {sorted(RULES)}")
        entry = None if axis is None else RULES[axis]
        devices = sizes.get(entry, 1) if entry else 1
        if size % devices and axis not in IF_EVEN:
            raise ConfigError(f"{name}: {axis} of size {size} must be a multiple of job.mesh.{entry}={devices}")
        entries.append(entry if devices > 1 and size % devices == 0 else None)
    split = [entry for entry in entries if entry]
    if len(set(split)) < len(split):
        raise ValueError(f"{name}: axes {tuple(axes)} collide, because RULES maps two of them to one axis of the mesh")
    return PartitionSpec(*entries)


def parameter_specs(params: Any, sizes: Mapping[str, int]) -> PyTree:
    """The spec of each parameter of a model, given as variables of shapes, in nested dicts: see `spec_of`."""

    def spec(path: Any, variable: nnx.Variable[Any]) -> PartitionSpec:
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        return spec_of(name, variable.shape, variable.get_metadata().get("axes", ()), sizes)

    specs = jax.tree_util.tree_map_with_path(spec, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.to_pure_dict(specs)


def optimizer_specs(optimizer: optax.GradientTransformation, params: PyTree, specs: PyTree) -> PyTree:
    """The specs of the optimizer's state: arrays of a parameter are split as it is, the rest is not split."""
    return optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )


def rows_here(sharding: NamedSharding, rows: int) -> np.ndarray:
    """The rows, ascending, that this process's devices have of an array that is split along its first axis."""
    held = np.zeros(rows, bool)
    for index in sharding.addressable_devices_indices_map((rows,)).values():
        held[index] = True
    return np.flatnonzero(held)
