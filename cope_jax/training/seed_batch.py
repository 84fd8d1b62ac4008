"""Seeds trained side by side in one program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cope_jax.array_types import PyTree


@dataclasses.dataclass(frozen=True)
class SeedBatch:
    """Lifts functions of one run to `width` runs with different seeds, by vmap over a leading axis S.

    A single run has no such axis: its program is the plain one.

    >>> SeedBatch(2).lift(lambda x, y: x + y, shared=1)(np.array([1, 2]), 10).tolist()
    [11, 12]
    """

    width: int = 1

    def lift(self, function: Callable[..., Any], shared: int = 0) -> Callable[..., Any]:
        """`function` for all runs at once; its last `shared` arguments are the same for all."""
        if self.width == 1:
            return function

        def lifted(*args: Any) -> Any:
            axes = (0,) * (len(args) - shared) + (None,) * shared
            return jax.vmap(function, in_axes=axes)(*args)

        return lifted

    def stack(self, trees: Sequence[PyTree]) -> PyTree:
        """One tree for each run, as the lifted functions take them."""
        return trees[0] if self.width == 1 else jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def unstack(self, tree: PyTree) -> list[PyTree]:
        """The inverse of `stack`."""
        if self.width == 1:
            return [tree]
        return [jax.tree.map(lambda leaf, s=s: leaf[s], tree) for s in range(self.width)]
