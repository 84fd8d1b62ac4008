"""Attention over a batch that is split over the devices of mesh axes: each device attends for its own examples."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from cope_jax.array_types import Array
from cope_jax.attention.inputs import Inputs
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown


def shard_batch(
    attention: Callable[[Encoding, Inputs], Array], encoding: Encoding, inputs: Inputs, axes: Sequence[str]
) -> Array:
    """The same as `attention(encoding, inputs)`, each device attending for its share of the examples.

    No example needs another, but a compiler that is left to find that out gathers, or adds up over all devices, what it
    cannot see through, such as a scatter into rows of many examples.

    Raises:
      ConfigError: no mesh with these axes, or a batch that they do not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for axis in axes:
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
    batch, devices = inputs.q.shape[0], math.prod(mesh.shape[axis] for axis in axes)
    if batch % devices:
        raise ConfigError(f"a batch of {batch} cannot be split over {' × '.join(axes)} = {devices} devices")
    graph, params = nnx.split(encoding)
    examples, everyone = PartitionSpec(tuple(axes)), PartitionSpec()

    def spec(x: Any) -> PartitionSpec:
        return examples if x.shape[0] == batch and batch > 1 else everyone

    # Indices are the same for all examples, and stay NumPy where they are known while tracing.
    arrays = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name not in ("mask", "drop")}
    segments = inputs.mask.q_segment_ids_BL, inputs.mask.k_segment_ids_BM
    arrays, segments = jax.tree.map(jnp.asarray, (arrays, segments))

    def on_device(params: Any, arrays: dict[str, Any], segments: Any, drop: Any) -> Array:
        mask = dataclasses.replace(inputs.mask, q_segment_ids_BL=segments[0], k_segment_ids_BM=segments[1])
        return attention(nnx.merge(graph, params), Inputs(**arrays, mask=mask, drop=drop))

    split = jax.shard_map(
        on_device,
        in_specs=(everyone, *jax.tree.map(spec, (arrays, segments)), PartitionSpec(None, tuple(axes))),
        out_specs=examples,
        axis_names=set(axes),
        check_vma=False,
    )
    # Compiled, since op by op a partly manual program cannot run.
    return jax.jit(split)(jax.tree.map(jnp.asarray, params), arrays, segments, inputs.drop)
