"""Maps the axes of arrays to axes of the mesh, with one table for the entire training state."""

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

# The logical axes that parameters name (`nnx.Param(..., axes=...)`). Others, such as layers and
# seeds, are not split.
RULES = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
# Logical axes whose sizes the data decide: they are split only if they split evenly.
IF_EVEN = frozenset({"vocab"})
# Activations, in the names of `Layout`.
BATCH, LENGTH, WIDTH = ("data", "fsdp"), "sequence", "tensor"


def create_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Creates the mesh of `config` from all devices; one process may ask for fewer, the first.

    >>> create_mesh(MeshConfig(data=1)).shape["fsdp"]
    1

    Raises:
      ConfigError: the number of devices does not fit the config.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dataclasses.asdict(config)
    named = math.prod(size for size in sizes.values() if size != -1)
    rest = [name for name, size in sizes.items() if size == -1]
    text = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if rest and len(devices) % named:
        raise ConfigError(
            f"job.mesh {text} needs a multiple of {named} devices, got {len(devices)}: set sizes whose product divides "
            f"{len(devices)}"
        )
    sizes |= {name: len(devices) // named for name in rest}
    asked = math.prod(sizes.values())
    if asked > len(devices):
        raise ConfigError(
            f"job.mesh {text} asks for {asked} devices, but there are {len(devices)}: set smaller sizes"
        )
    processes = {device.process_index for device in devices}
    if asked < len(devices) and len(processes) > 1:
        raise ConfigError(
            f"job.mesh {text} uses {asked} of {len(devices)} devices, but several processes must use all: set one axis "
            "to -1"
        )
    shape, kinds = tuple(sizes[axis] for axis in AXES), (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices[:asked])


def layout_of(mesh: Mesh) -> Layout:
    """The layout that splits activations over a mesh; an axis of one device splits nothing."""

    def used(axis: str) -> str | None:
        return axis if mesh.shape[axis] > 1 else None

    return Layout(tuple(axis for axis in BATCH if used(axis)), used(LENGTH), used(WIDTH))


def compiler_options(mesh: Mesh) -> dict[str, int]:
    """The compiler's options for training and evaluation on a mesh.

    For up to 32 TPU chips, XLA cuts a product with a split parameter into pieces, one for each chip,
    and passes them around a ring. Small pieces multiply slowly, so here products wait for whole
    parameters at any number of chips: an `lm:1b` step on 32 chips takes half the cycles.
    """
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 2**20} if on_tpu else {}


def check_sizes(mesh: Mesh, block: BlockConfig | None, batch_sizes: Mapping[str, int]) -> None:
    """ConfigError if the mesh cannot split heads or batches evenly; `batch_sizes` by field name."""
    rows = math.prod(mesh.shape[axis] for axis in BATCH)
    for name, size in batch_sizes.items():
        if size % rows:
            raise ConfigError(
                f"{name}={size} cannot be split evenly over the {rows} devices of job.mesh data × fsdp: "
                f"choose a multiple of {rows}, or set --config.job.mesh.data"
            )
    if block is None:
        return
    shape = block.attention_shape(None)
    for name, heads in (("num_heads", shape.num_heads), ("num_kv_heads", shape.kv_heads)):
        if heads % mesh.shape[WIDTH]:
            raise ConfigError(
                f"model.block.{name}={heads} must be a multiple of job.mesh.tensor={mesh.shape[WIDTH]}"
            )


def spec_of(
    name: str, shape: Sequence[int], axes: Sequence[str | None], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Returns the spec that splits the parameter `name` of this shape.

    `axes` names the last axes of the parameter; any axes before the named ones are not split.
    `sizes` is the number of devices along each axis of the mesh.

    >>> spec_of("kernel", (12, 64, 256), ("embed", "mlp"), {"fsdp": 2, "tensor": 4})
    P(None, 'fsdp', 'tensor')

    Raises:
      ConfigError: a size is not a multiple of the number of devices that split its axis.
      ValueError: RULES maps two of the axes to one mesh axis, or lacks one of the axes.
    """
    entries: list[str | None] = [None] * (len(shape) - len(axes))
    for axis, size in zip(axes, shape[len(entries) :], strict=True):
        if axis is not None and axis not in RULES:
            raise ValueError(
                f"the logical axis {axis!r} of {name} is not in RULES: choose one of {sorted(RULES)}"
            )
        entry = None if axis is None else RULES[axis]
        devices = sizes.get(entry, 1) if entry else 1
        if size % devices and axis not in IF_EVEN:
            raise ConfigError(
                f"the size {size} of {axis} in {name} must be a multiple of job.mesh.{entry}={devices}"
            )
        entries.append(entry if devices > 1 and size % devices == 0 else None)
    split = [entry for entry in entries if entry]
    if len(set(split)) < len(split):
        raise ValueError(
            f"the axes {tuple(axes)} of {name} collide, because RULES maps two of them to one axis of the mesh: choose "
            "other axes"
        )
    return PartitionSpec(*entries)


def parameter_specs(params: Any, sizes: Mapping[str, int]) -> PyTree:
    """The spec of each parameter, in nested dicts: see `spec_of`. `params` contains shapes."""

    def spec(path: Any, variable: nnx.Variable[Any]) -> PartitionSpec:
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        return spec_of(name, variable.shape, variable.get_metadata().get("axes", ()), sizes)

    specs = jax.tree_util.tree_map_with_path(
        spec, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return nnx.to_pure_dict(specs)


def optimizer_specs(
    optimizer: optax.GradientTransformation, params: PyTree, specs: PyTree
) -> PyTree:
    """The specs of the optimizer's state: arrays of a parameter like it, others whole."""
    return optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )


def rows_here(sharding: NamedSharding, rows: int) -> np.ndarray:
    """The ascending indices of rows on this process's devices; `sharding` splits the first axis."""
    is_here = np.zeros(rows, bool)
    for index in sharding.addressable_devices_indices_map((rows,)).values():
        is_here[index] = True
    return np.flatnonzero(is_here)
