"""The devices that a program runs on, and whether kernels fit there: XLA cannot split a kernel over
a mesh.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from cope_jax.array_types import Array
from cope_jax.attention.request import Request
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown


def current_device() -> str:
    """The kind of device that a program is for: that of the current mesh, or the default device."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX adds its options when it starts
    device = jax.sharding.get_abstract_mesh().abstract_device or default
    if isinstance(device, str):  # the name of a platform
        device = jax.devices(device)[0]
    return jax.devices()[0].device_kind if device is None else device.device_kind


def why_undivided(axes: Sequence[str | None], head_axis: str | None, groups: int) -> str | None:
    """Returns why devices cannot share the work of a kernel; None if they can.

    Args:
      axes: the axes of the mesh that split the batch, and the sequence of a ring.
      head_axis: the axis that splits the heads, or None.
      groups: the number of key heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if (
        mesh.empty
        and current_device().startswith("TPU")
        and jax.default_backend() == "tpu"
        and jax.device_count() > 1
    ):
        return "there are several devices and no mesh: call under jax.set_mesh(mesh)"
    for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if size > 1 and kind == AxisType.Explicit:
            return f"axis {axis!r} of the mesh is of type Explicit, not Auto"
        if size > 1 and kind == AxisType.Auto and axis not in (*axes, head_axis):
            return f"axis {axis!r} of the mesh splits neither the batch nor the heads"
        if axis == head_axis and groups % size:
            return f"axis {axis!r} of the mesh does not divide {groups} key heads"
    return None


@functools.cache
def log_choice(name: str, reason: str = "") -> None:
    """Logs once which implementation runs, and why not those that come before it."""
    logging.getLogger("cope_jax").info(
        "attention: %s%s", name, f", because {reason}" if reason else ""
    )


def shard_batch(
    attention: Callable[[Encoding, Request], Array], encoding: Encoding, request: Request
) -> Array:
    """Splits the batch over devices, and computes `attention(encoding, request)` on each device for
    its own examples.

    Examples are independent of each other, but the compiler cannot always infer this. Without this
    function, the compiler would then gather or sum over all devices, for example for a scatter into
    rows of many examples.

    Raises:
      ConfigError: the current mesh does not have the axes of the request's layout, or they do not
        split the batch evenly.
    """
    axes, mesh = request.layout.batch, jax.sharding.get_abstract_mesh()
    for axis in axes:
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
    batch, devices = len(request.queries.q), math.prod(mesh.shape[axis] for axis in axes)
    if batch % devices:
        raise ConfigError(
            f"a batch of {batch} cannot be split over {' × '.join(axes)} = {devices} devices: use a batch size that "
            f"is a multiple of {devices}"
        )
    graph, params = nnx.split(encoding)
    examples, everyone = PartitionSpec(axes), PartitionSpec()
    # Indices are the same for all examples, and stay NumPy where they are known while tracing.
    indices = request.queries.indices, request.keys.indices

    def with_indices(request: Request, indices: Any) -> Request:
        queries = dataclasses.replace(request.queries, indices=indices[0])
        keys = dataclasses.replace(request.keys, indices=indices[1])
        return dataclasses.replace(request, queries=queries, keys=keys)

    def spec(x: Any) -> PartitionSpec:
        return examples if x.shape[0] == batch and batch > 1 else everyone

    def on_device(params: Any, request: Request) -> Array:
        return attention(nnx.merge(graph, params), with_indices(request, indices))

    params, arrays = jax.tree.map(jnp.asarray, (params, with_indices(request, (None, None))))
    specs = jax.tree.map(spec, arrays)
    if arrays.drop is not None:
        drop = dataclasses.replace(arrays.drop, keys_2BH=PartitionSpec(None, axes))
        specs = dataclasses.replace(specs, drop=drop)
    split = jax.shard_map(
        on_device,
        in_specs=(everyone, specs),
        out_specs=examples,
        axis_names=set(axes),
        check_vma=False,
    )
    # Compiled, because a partly manual program cannot run op by op.
    return jax.jit(split)(params, arrays)
