"""Models as arguments of compiled programs."""

import dataclasses
from typing import Any

from flax import nnx


@dataclasses.dataclass(frozen=True)
class Structure:
    """A model without its numbers, by which compiled programs are found again; its config may hold what has no hash."""

    graph: nnx.GraphDef[Any]

    def __hash__(self) -> int:
        return hash(type(self.graph))
