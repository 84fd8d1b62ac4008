"""The layout of activations: which axes of the mesh split the batch, the sequence and the width."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names the axes of the current mesh (`jax.set_mesh`) that split activations; none by default.

    Attributes:
      batch: axes that split the batch.
      length: axis that splits the sequence; attention then uses a ring.
      width: axis that splits heads, hidden units and logits.

    >>> Layout(batch=("data", "fsdp"), width="tensor").spec("batch", "length", "width", None)
    P(('data', 'fsdp'), None, 'tensor', None)
    """

    batch: tuple[str, ...] = ()
    length: str | None = None
    width: str | None = None

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The sharding of an array with the axes "batch", "length", "width", or None: not split."""
        return PartitionSpec(*(getattr(self, axis) or None if axis else None for axis in axes))

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Constrains `x` to this layout; an axis that the devices cannot share evenly is not split.

        Raises:
          ConfigError: the current mesh does not have an axis of the layout.
        """
        entries = tuple(self.spec(*axes))
        sizes = jax.sharding.get_abstract_mesh().shape
        traced = isinstance(x, jax.core.Tracer)  # a parameter outside of jit may know no mesh
        if self == WHOLE or not (any(entries) or (sizes and traced)):
            return x

        def devices(entry: Any) -> int:
            names = (entry,) if isinstance(entry, str) else entry or ()
            for name in names:
                if name not in sizes:
                    raise ConfigError(
                        f"the layout needs a mesh with the axis {name!r}: call under jax.set_mesh(mesh)"
                    )
            return math.prod(sizes[name] for name in names)

        even = (
            entry if size % devices(entry) == 0 else None
            for entry, size in zip(entries, x.shape, strict=True)
        )
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*even))


WHOLE = Layout()
"""The layout that splits nothing."""
