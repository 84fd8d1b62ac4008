"""The zigzag schedule of ring attention: which device holds which chunk of the sequence, and how
keys move.

The sequence is cut into 2n chunks for n devices. The queries of a chunk stay on one device. The
keys of a chunk start on the device of the chunk's queries, and at each step move to the queries of
the next chunk. So after s steps the queries of chunk c see the keys of chunk c − s: first their own
chunk, then the chunk before, down to the first chunk. An encoding's carry needs this order. After
the first chunk, the queries meet the chunks from the last chunk down to c + 1. In causal attention
these chunks are hidden and cost nothing.

Device d has the chunks d and 2n−1−d. In causal attention, the queries of these chunks see d+1 and
2n−d chunks of keys, so every device computes 2n+1 chunks. After 2n steps all keys are back where
they started. In the backward pass, the gradients of the keys are back too.
"""

import dataclasses
import functools
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
    """The device of each chunk, and how chunks move between devices: see the docstring of the
    module.

    The first axis of an array numbers chunks. Device d has two chunks, `[low, high]`: the chunks d
    and 2n−1−d.

    >>> Ring("sequence", 4).device_of(5)
    2

    Attributes:
      axis: the axis of the mesh.
      devices: n.
      device: the number of the current device, in functions that `sharded` calls. It comes from an
        array: XLA refuses `axis_index` in layers that are recomputed.
    """

    axis: str
    devices: int
    device: Any = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, axis: str) -> "Ring":
        """Creates the ring over an axis of the current mesh.

        Raises:
          ConfigError: there is no mesh, the mesh does not have this axis, or the type of the axis
            is not Auto.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ConfigError(
                f"sequence_axis={axis!r} needs a mesh with this axis: call under jax.set_mesh(mesh)"
            )
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
        if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] != AxisType.Auto:
            raise ConfigError(
                f"axis {axis!r} of the mesh must be of type Auto: give this type in axis_types to jax.make_mesh"
            )
        return cls(axis, mesh.shape[axis])

    @property
    def chunks(self) -> int:
        return 2 * self.devices

    def device_of(self, chunk: int) -> int:
        """Returns the device that a chunk is on."""
        return min(chunk, self.chunks - 1 - chunk)

    def sharded(
        self, function: Callable[..., Any], sharded: tuple[Any, ...], results: Any
    ) -> Callable[..., Any]:
        """Returns a function that calls `function(ring, *arguments)` on each device of the ring.

        `sharded` and `results` describe the arguments and results of `function`: True means an
        array that is split by chunks, False an array that is whole on each device.
        """

        def spec(split: bool) -> PartitionSpec:
            return PartitionSpec(self.axis) if split else PartitionSpec()

        def on_device(numbers: Array, *arguments: Any) -> Any:
            return function(dataclasses.replace(self, device=numbers[0]), *arguments)

        call = jax.shard_map(
            on_device,
            in_specs=(PartitionSpec(self.axis), *jax.tree.map(spec, sharded)),
            out_specs=jax.tree.map(spec, results),
            axis_names={self.axis},
            check_vma=False,
        )
        return functools.partial(call, jnp.arange(self.devices, dtype=jnp.int32))

    def whole(self, x: Array, axis: int) -> Array:
        """Keeps XLA from splitting an axis, because gradients are wrong if the axis does not split
        evenly.
        """
        spec = [None if a == axis else PartitionSpec.UNCONSTRAINED for a in range(x.ndim)]
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))

    def placed(self, tree: T) -> T:
        """Moves chunks from their natural order (2d and 2d+1 on device d) to the devices of the
        schedule.
        """

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
        """Moves each chunk's data to the place of the next chunk, and the last chunk's data to the
        first place.
        """
        up = [(device, device + 1) for device in range(self.devices - 1)]
        down = [(device + 1, device) for device in range(self.devices - 1)]

        def move(pair: Array) -> Array:
            low = jnp.where(self.device == 0, pair[1], self._send(pair[0], up))
            high = jnp.where(self.device == self.devices - 1, pair[0], self._send(pair[1], down))
            return jnp.stack([low, high])

        return jax.tree.map(move, tree)

    def _routes(self, parity: int) -> list[tuple[int, int]]:
        return [(chunk // 2, self.device_of(chunk)) for chunk in range(parity, self.chunks, 2)]

    def _is_even(self) -> Array:
        return self.device % 2 == 0

    def _send(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        return jax.lax.ppermute(x, self.axis, pairs)
