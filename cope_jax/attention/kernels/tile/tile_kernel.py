"""One kernel over all blocks of queries: the tile programs that it runs, what they read, and what
they write.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import PyTree
from cope_jax.attention.kernels.tile.tile_arguments import Argument, is_argument, leaves_of, specs
from cope_jax.attention.kernels.tile.tile_plan import Programs, TilePlan
from cope_jax.attention.kernels.tile.tile_values import Spec
from cope_jax.encodings import Carry


class Half(NamedTuple):
    """A function that a kernel computes once for a block of queries, before or after it visits the keys.

    Attributes:
      function: called as `function(graph, *args)` on one tile; returns what follows for results.
      args: what the function reads, a tuple of trees of `Argument`.
      results: what it writes; to what the blocks of keys add up, it adds.
    """

    function: Callable[..., Any]
    args: tuple[PyTree, ...]
    results: PyTree


class TileKernel:
    """One kernel over all blocks of queries, which `Execution.run` runs.

    A program of the kernel has one block of queries of one head, and visits the blocks of keys from
    the nearest to the farthest, in the order of `streaming_softmax.over_blocks`.

    Args:
      plan: the data.
      function: called as `function(graph, *args, loop)` on one tile; returns what follows for
        (loop, totals, on_keys).
      args: what the function reads, a tuple of trees of `Argument`; begins with `plan.data`.
      loop: what passes from one block of keys to the next.
      totals: what is added up over the blocks of keys.
      on_keys: what is added to blocks of keys, over all blocks of queries.
      carry: the encoding's carry for the trees `args` and `loop`.
      halves: what comes before and after the blocks of keys; none if the caller computes it.

    Attributes:
      steps: the program of a block of keys, by (masked, saturated, how many blocks it sees as one).
      ask: the programs that tell which rows are `saturated` and `done`; None if no row ever is.
      used: the arguments that some program uses; `inputs` are those that lie in arrays.
      outputs: the leaves of the results; `counts` of them are of loop, totals and on_keys.
      written: for each output, whether the kernel computes it; if not, it is 0.
    """

    def __init__(
        self,
        plan: TilePlan,
        function: Callable[..., Any],
        args: tuple[PyTree, ...],
        loop: PyTree,
        totals: PyTree,
        on_keys: PyTree,
        carry: Callable[[Any, Any], Carry],
        halves: tuple[Half, ...] = (),
    ):
        self.plan, self.args, self.loop = plan, args, loop
        self.results = (loop, totals, on_keys)
        self.halves = [
            (half, plan.own.programs(half.function, *specs((half.args, half.results))))
            for half in halves
        ]
        self.carry = carry

        def program(masked: bool, saturated: bool, blocks: int = 1) -> Programs:
            trees = jax.tree.map(
                lambda x: x.widened(blocks), ((*args, loop), self.results), is_leaf=is_argument
            )
            return plan.own.programs(functools.partial(function, masked, saturated), *specs(trees))

        self.ask = {name: self._asking(name) for name in ("saturated", "done")}
        self.steps = {
            (True, False, 1): program(True, False),
            (False, False, 1): program(False, False),
        }
        if self.ask["saturated"] is not None:
            self.steps |= {
                (False, True, blocks): program(False, True, blocks) for blocks in {1, plan.wide}
            }
        leaves = [leaves_of(tree) for tree in self.results]
        self.counts = [len(group) for group in leaves]
        nonzero = [
            any(x is not None for x in kinds)
            for kinds in zip(*(group.program.results for group in self.steps.values()), strict=True)
        ]
        # What is 0 in every program is neither added up nor written.
        self.written = [use or n < self.counts[0] for n, use in enumerate(nonzero)]
        self.outputs = [x for group in leaves for x in group]
        self.inputs = self._inputs()
        self.places = {id(x): n for n, x in enumerate(self.inputs)}

    def _asking(self, name: str) -> Programs | None:
        """The program that tells for each row whether it is `saturated` or `done`; None if no row
        ever is.
        """
        rows = Spec((1, 1, self.plan.sizes.queries), jnp.bool_, (2, None))

        def function(graph: Any, params: PyTree, carry: Carry) -> Any:
            answer = getattr(nnx.merge(graph, params), name)(carry)
            return jnp.zeros(rows.shape, rows.dtype) if answer is None else answer

        args = specs((self.plan.params, self.carry(self.args, self.loop)))
        programs = self.plan.own.programs(function, args, rows)
        return None if programs.program.results[0] is None else programs  # always False

    def _inputs(self) -> list[Argument]:
        """The arguments that some program uses, each once."""
        carry_args = self.plan.params, self.carry(self.args, self.loop)
        programs = [(step, (*self.args, self.loop)) for step in self.steps.values()]
        programs += [(step, carry_args) for step in self.ask.values() if step is not None]
        programs += [(step, half.args) for half, step in self.halves]
        used = {id(x): x for step, args in programs for x in step.reads(args)}
        used |= {id(x): x for x in leaves_of(self.loop)}
        self.used = list(used.values())
        return [x for x in self.used if x.given]
