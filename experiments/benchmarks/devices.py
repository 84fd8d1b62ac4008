"""Work split over JAX's devices; `process` makes a CPU one device for each core."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax.errors import ConfigError

AXIS = "devices"


def choose(asked: int) -> int:
    """How many of JAX's devices share the work; 0 asks for all. Raises ConfigError where there are fewer than asked.

    >>> choose(1)
    1
    """
    found = jax.device_count()
    if asked > found:
        raise ConfigError(f"--devices={asked}, and JAX has {found}: ask for fewer, or look into XLA_FLAGS")
    return asked or found


@dataclasses.dataclass(frozen=True)
class Split:
    """Arrays of which each device has its share.

    Attributes:
      mesh: the devices, as its axis `AXIS`.
      spec: which dimension of the arrays is split.
    """

    mesh: Mesh
    spec: PartitionSpec

    @classmethod
    def over(cls, devices: int, dimension: int) -> "Split":
        """Over the first devices that JAX has."""
        mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        return cls(mesh, PartitionSpec(*[None] * dimension, AXIS))

    def share(self, arrays: Any) -> Any:
        """Puts each share where it belongs."""
        return jax.device_put(arrays, NamedSharding(self.mesh, self.spec))

    def copy(self, arrays: Any) -> Any:
        """Puts all of the arrays on every device."""
        return jax.device_put(arrays, NamedSharding(self.mesh, PartitionSpec()))
