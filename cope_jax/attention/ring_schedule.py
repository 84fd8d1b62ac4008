"""The zigzag schedule of ring attention: which device holds which chunk of the sequence, and how keys go around.

The sequence is cut into 2n chunks for n devices. The queries of a chunk stay where they are. Its keys start there too,
and at each step go to where the queries of the next chunk are. So after s steps the queries of chunk c see the keys of
chunk c − s: their own, then the one before, down to the first, which is the order that an encoding's carry needs. After
the first chunk come the last ones, which causality hides and which cost nothing.

Device d has the chunks d and 2n−1−d. Their queries see d+1 and 2n−d chunks, so every device computes 2n+1. After 2n
steps all keys are back where they started; in the backward pass, so are their gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Where chunks are, and how they move: see the docstring of the module.

    The first axis of arrays is that of the chunks; each device has two, `[low, high]`.

    >>> Ring("sequence", 4).device_of(5)
    2
    """

    axis: str
    devices: int

    @classmethod
    def of(cls, axis: str) -> "Ring":
        """The ring over an axis of the current mesh. ConfigError: there is no mesh, or it has no such axis."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ConfigError(f"sequence_axis={axis!r} needs a mesh with this axis: call under jax.set_mesh(mesh)")
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
        if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] != AxisType.Auto:
            raise ConfigError(f"axis {axis!r} of the mesh must be of type Auto: give axis_types to jax.make_mesh")
        return cls(axis, mesh.shape[axis])

    @property
    def chunks(self) -> int:
        return 2 * self.devices

    def device_of(self, chunk: int) -> int:
        """The device that a chunk is on."""
        return min(chunk, self.chunks - 1 - chunk)

    def sharded(self, function: Callable[..., Any], sharded: tuple[Any, ...], results: Any) -> Callable[..., Any]:
        """`function` on each device; True marks arguments and results split by chunks, False those on all devices."""

        def spec(split: bool) -> PartitionSpec:
            return PartitionSpec(self.axis) if split else PartitionSpec()

        return jax.shard_map(
            function,
            in_specs=jax.tree.map(spec, sharded),
            out_specs=jax.tree.map(spec, results),
            axis_names={self.axis},
            check_vma=False,
        )

    def whole(self, x: Array, axis: int) -> Array:
        """Keeps XLA from splitting an axis: if the devices do not divide it, its gradients would be wrong."""
        spec = [None if a == axis else PartitionSpec.UNCONSTRAINED for a in range(x.ndim)]
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

    def placed(self, tree: T) -> T:
        """Moves chunks from their natural order, 2d and 2d+1 on device d, to the devices of the schedule."""

        def place(pair: Array) -> Array:
            even, odd = (self._send(pair[parity], self._routes(parity)) for parity in (0, 1))
            return jnp.where(self._is_even(), jnp.stack([even, odd]), jnp.stack([odd, even]))

        return jax.tree.map(place, tree)

    def unplaced(self, tree: T) -> T:
        """The inverse of `placed`."""

        def unplace(pair: Array) -> Array:
            even, odd = jnp.where(self._is_even(), pair, pair[::-1])
            back = [[(to, at) for at, to in self._routes(parity)] for parity in (0, 1)]
            return jnp.stack([self._send(even, back[0]), self._send(odd, back[1])])

        return jax.tree.map(unplace, tree)

    def moved(self, tree: T) -> T:
        """Moves the data of each chunk to the next chunk, and that of the last to the first."""
        up = [(device, device + 1) for device in range(self.devices - 1)]
        down = [(device + 1, device) for device in range(self.devices - 1)]
        device = jax.lax.axis_index(self.axis)

        def move(pair: Array) -> Array:
            low = jnp.where(device == 0, pair[1], self._send(pair[0], up))
            high = jnp.where(device == self.devices - 1, pair[0], self._send(pair[1], down))
            return jnp.stack([low, high])

        return jax.tree.map(move, tree)

    def _routes(self, parity: int) -> list[tuple[int, int]]:
        return [(chunk // 2, self.device_of(chunk)) for chunk in range(parity, self.chunks, 2)]

    def _is_even(self) -> Array:
        return jax.lax.axis_index(self.axis) % 2 == 0

    def _send(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        return jax.lax.ppermute(x, self.axis, pairs)
