"""Splits attention over JAX's devices; `process` turns a CPU into one device for each core."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from tools.benchmark.workloads import Problem
from tools.timing import LeftOut

AXIS = "devices"
Attention = Callable[..., Array]
"""(params, q_BLHK, k_BLHK, v_BLHK) → out_BLHK, for any L."""
Build = Callable[[Problem], tuple[Attention, PyTree]]
"""Creates attention with the heads of a problem. Returns attention and its parameters."""

SEQUENCE, HEADS = 1, 2  # dimensions of q, k and v
# Length and tolerance for comparing heads. Heads that add different terms to the logits differ by
# far more.
LENGTH, TOLERANCE = 8, 1e-4


def choose(asked: int) -> int:
    """The number of JAX devices that share the work: `asked`, or all if `asked` is 0.

    Raises:
      ConfigError: JAX has fewer devices.
    """
    available = jax.device_count()
    if asked > available:
        raise ConfigError(
            f"--devices={asked}, but JAX has {available} devices: ask for fewer, or check XLA_FLAGS"
        )
    return asked or available


@dataclasses.dataclass(frozen=True)
class Plan:
    """Attention on one device, or on the devices of a mesh."""

    attention: Attention  # attention of all heads
    params: PyTree  # every device has all parameters
    mesh: Mesh | None = None  # its axis is `AXIS`
    split: int = HEADS  # the dimension of q, k and v that the devices share
    note: str = ""  # why the work is not split although there are several devices, in one line

    @property
    def spec(self) -> PartitionSpec:
        """The split of q, k and v."""
        return PartitionSpec(*[None] * self.split, AXIS)

    def place(self, params: PyTree, arrays: Any) -> tuple[PyTree, Any]:
        """Puts parameters and arrays on the devices that need them."""
        if self.mesh is None:
            return params, arrays
        places = NamedSharding(self.mesh, PartitionSpec()), NamedSharding(self.mesh, self.spec)
        return jax.device_put((params, arrays), places)


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def split_heads(build: Build, problem: Problem) -> Plan:
    """Splits heads over the problem's devices if that gives the same result; otherwise uses one
    device.
    """
    plan, heads, devices = Plan(*build(problem)), problem.heads, problem.devices
    if devices == 1:
        return plan
    if heads % devices:
        return dataclasses.replace(
            plan, note=f"on 1 device, because {devices} devices cannot share {heads} heads"
        )
    attention = _part(build, plan, problem)
    if attention is None:
        return dataclasses.replace(
            plan, note="on 1 device, because the encoding treats its heads differently"
        )
    plan = dataclasses.replace(plan, mesh=_mesh(devices))
    specs = (PartitionSpec(), *[plan.spec] * 3)
    sharded = jax.shard_map(
        attention, mesh=plan.mesh, in_specs=specs, out_specs=plan.spec, check_vma=False
    )
    return dataclasses.replace(plan, attention=sharded)


def _part(build: Build, plan: Plan, problem: Problem) -> Attention | None:
    """Attention of one device's heads with the parameters of all heads; None if this split would
    change the result.
    """
    try:
        attention, of_part = build(
            dataclasses.replace(problem, heads=problem.heads // problem.devices)
        )
    except ConfigError:  # an option has an entry for every head
        return None
    shapes, shapes_of_part = (
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (plan.params, of_part)
    )
    if shapes != shapes_of_part:
        return None
    tiny = dataclasses.replace(problem, length=min(LENGTH, problem.length), batch=1)
    arrays = [jnp.asarray(array) for array in tiny.arrays()[:3]]
    compiled, whole = jax.jit(attention), jax.jit(plan.attention)(plan.params, *arrays)
    shares = zip(*(jnp.split(array, problem.devices, HEADS) for array in arrays), strict=True)
    parts = np.concatenate([compiled(plan.params, *share) for share in shares], HEADS)
    return attention if np.allclose(parts, whole, rtol=0, atol=TOLERANCE) else None


def split_sequence(attention: Attention, params: PyTree, problem: Problem) -> Plan:
    """Splits the sequence over the problem's devices, for ring attention."""
    if problem.devices == 1:
        raise LeftOut("ring attention needs several devices, but has 1: set --devices above 1")
    if problem.length % problem.devices:
        raise LeftOut(
            f"{problem.devices} devices cannot share a length of {problem.length}: choose a multiple of "
            f"{problem.devices}"
        )
    return Plan(attention, params, _mesh(problem.devices), SEQUENCE)
