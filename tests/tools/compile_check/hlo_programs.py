"""Small programs whose arithmetic and messages are known."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from tools.compile_check.hlo import Module
from tools.compile_check.trip_counts import Visit, walk


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)


def floats(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def own(function: Callable[..., Any], out: PartitionSpec) -> Callable[..., Any]:
    """`function` of each of eight devices' own part of an array, split along its first axis."""
    parts = PartitionSpec(("rows", "columns"))
    return jax.shard_map(function, mesh=mesh(), in_specs=parts, out_specs=out, check_vma=False)


def compiled(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> list[Visit]:
    return visited(jax.jit(function).lower(*shapes).compile().as_text())


def lowered(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> list[Visit]:
    """Before optimisation, where nothing is stated of loops but their code, as on a TPU."""
    text = jax.jit(function).lower(*shapes).as_text("hlo")
    assert not re.search("known_trip_count", text)
    return visited(text)


def visited(text: str, turns: Callable[[str], float | None] = lambda name: None) -> list[Visit]:
    return list(walk(Module.parse(text), turns))
