"""The seats of ring attention: who sits where, and how keys go around.

A ring has two seats on each of its n devices, and the sequence is cut into as many chunks. Seat c keeps the queries of
chunk c. Keys start in their own seat too, and at each step go on to the next. So after s steps seat c sees the keys of
chunk c − s: its own, then the one before, down to the first, which is the order that an encoding's carry wants. Beyond
the first come the last ones, which causality hides and which cost nothing.

The ring is folded over the devices: device d has the seats d and 2n−1−d. These see d+1 and 2n−d chunks, so that every
device has 2n+1 to see. After 2n steps all keys are home again, and in the backward pass their gradients with them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.typing import Array

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ring:
    """The seats, and how what sits in them moves: see the text above.

    Arrays have the seats for their first axis; within a device these are two, `[low, high]`.

    >>> Ring("sequence", 4).device_of(5)
    2
    """

    axis: str
    devices: int

    @classmethod
    def of(cls, axis: str) -> "Ring":
        """The ring of an axis of the mesh in context; ConfigError where there is none."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ConfigError(f"sequence_axis={axis!r} needs a mesh with this axis: call under jax.set_mesh(mesh)")
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
        if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] != AxisType.Auto:
            raise ConfigError(f"axis {axis!r} of the mesh must be of type Auto: give axis_types to jax.make_mesh")
        return cls(axis, mesh.shape[axis])

    @property
    def seats(self) -> int:
        return 2 * self.devices

    def device_of(self, seat: int) -> int:
        """The device that a seat is on."""
        return min(seat, self.seats - 1 - seat)

    def sharded(self, function: Callable[..., Any], sharded: tuple[bool, ...], results: Any) -> Callable[..., Any]:
        """`function` on each device; which arguments and results are split by seats, and which all devices have."""

        def spec(split: bool) -> PartitionSpec:
            return PartitionSpec(self.axis) if split else PartitionSpec()

        return jax.shard_map(
            function,
            in_specs=tuple(map(spec, sharded)),
            out_specs=jax.tree.map(spec, results),
            axis_names={self.axis},
            check_vma=False,
        )

    def whole(self, x: Array, axis: int) -> Array:
        """Keeps XLA from splitting an axis. Where the devices do not divide it, its gradients come out wrong."""
        spec = [None if a == axis else PartitionSpec.UNCONSTRAINED for a in range(x.ndim)]
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

    def seated(self, tree: T) -> T:
        """From chunks in their natural order, 2d and 2d+1 on device d, to seats."""

        def seat(pair: Array) -> Array:
            even, odd = (self._send(pair[parity], self._seating(parity)) for parity in (0, 1))
            return jnp.where(self._is_even(), jnp.stack([even, odd]), jnp.stack([odd, even]))

        return jax.tree.map(seat, tree)

    def unseated(self, tree: T) -> T:
        """The inverse of `seated`."""

        def unseat(pair: Array) -> Array:
            even, odd = jnp.where(self._is_even(), pair, pair[::-1])
            back = [[(to, at) for at, to in self._seating(parity)] for parity in (0, 1)]
            return jnp.stack([self._send(even, back[0]), self._send(odd, back[1])])

        return jax.tree.map(unseat, tree)

    def moved(self, tree: T) -> T:
        """What sits in each seat moves to the next, and from the last to the first."""
        up = [(device, device + 1) for device in range(self.devices - 1)]
        down = [(device + 1, device) for device in range(self.devices - 1)]
        device = jax.lax.axis_index(self.axis)

        def move(pair: Array) -> Array:
            low = jnp.where(device == 0, pair[1], self._send(pair[0], up))
            high = jnp.where(device == self.devices - 1, pair[0], self._send(pair[1], down))
            return jnp.stack([low, high])

        return jax.tree.map(move, tree)

    def _seating(self, parity: int) -> list[tuple[int, int]]:
        return [(seat // 2, self.device_of(seat)) for seat in range(parity, self.seats, 2)]

    def _is_even(self) -> Array:
        return jax.lax.axis_index(self.axis) % 2 == 0

    def _send(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        return jax.lax.ppermute(x, self.axis, pairs)
