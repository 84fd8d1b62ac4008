"""Attention with its heads split over devices, where the encoding treats all heads alike."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cope_jax.errors import ConfigError
from cope_jax.typing import Array, PyTree
from experiments.benchmarks.devices import Split
from experiments.benchmarks.problem import Problem

Attention = Callable[..., Array]
"""(params, q_BLHK, k_BLHK, v_BLHK) → out_BLHK, for any L."""
Build = Callable[[Problem], tuple[Attention, PyTree]]
"""Attention with the heads of a problem, and its parameters."""

DIMENSION = 2
# The tiny problem on which heads are compared; what is added to the logits of other heads differs by far more.
LENGTH, TOLERANCE = 8, 1e-4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How attention runs.

    Attributes:
      attention: of all heads.
      params: its parameters.
      split: of its arrays; None: one device.
      note: why it is not split although several devices are there, in one line; or empty.
    """

    attention: Attention
    params: PyTree
    split: Split | None = None
    note: str = ""

    @classmethod
    def of(cls, build: Build, problem: Problem) -> "Plan":
        """Heads split over the problem's devices, where that gives the same; else all on one."""
        attention, params = build(problem)
        heads, devices = problem.heads, problem.devices
        if devices == 1:
            return cls(attention, params)
        if heads % devices:
            return cls(attention, params, note=f"on 1 device, for {devices} cannot share {heads} heads evenly")
        part = _part(build, params, problem)
        if part is None or not _alike(attention, part, params, problem):
            return cls(attention, params, note="on 1 device, for it treats its heads differently")
        split = Split.over(devices, DIMENSION)
        whole, shares = PartitionSpec(), (split.spec,) * 3
        sharded = jax.shard_map(part, mesh=split.mesh, in_specs=(whole, *shares), out_specs=split.spec, check_vma=False)
        return cls(sharded, params, split)


def _part(build: Build, params: PyTree, problem: Problem) -> Attention | None:
    """Attention of one device's heads, if that is possible with the parameters of all heads."""
    try:
        part, of_part = build(dataclasses.replace(problem, heads=problem.heads // problem.devices))
    except ConfigError:  # options that name every head
        return None
    shapes, found = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (params, of_part))
    return part if shapes == found else None


def _alike(attention: Attention, part: Attention, params: PyTree, problem: Problem) -> bool:
    """Whether the parts' attention is that of all heads."""
    tiny = dataclasses.replace(problem, length=min(LENGTH, problem.length), batch=1)
    arrays = [jnp.asarray(array) for array in tiny.arrays()[:3]]
    compiled = jax.jit(part)
    shares = zip(*(jnp.split(array, problem.devices, DIMENSION) for array in arrays), strict=True)
    found = [compiled(params, *share) for share in shares]
    return np.allclose(np.concatenate(found, DIMENSION), jax.jit(attention)(params, *arrays), rtol=0, atol=TOLERANCE)
