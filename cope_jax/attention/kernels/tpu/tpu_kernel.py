"""One Pallas kernel over all blocks of queries: what it reads, which blocks of keys it visits, and
what it writes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.kernels.tile.tile_values import Spec
from cope_jax.attention.kernels.tpu.tpu_arguments import Argument, is_argument, specs
from cope_jax.attention.kernels.tpu.tpu_plan import KernelPlan, Programs
from cope_jax.encodings import Carry

VMEM_BYTES = 100 * 2**20


def _visit(
    plan: KernelPlan,
    span_ref: Any,
    loop: Any,
    step: Callable[..., Any],
    saturated: Callable[..., Any],
    done: Callable[..., Any],
) -> Any:
    """Calls `step(first, loop, blocks=…, masked=…, saturated=…)` for all blocks of keys with pairs,
    from near to far.

    The order and the meaning are those of `streaming_softmax.over_blocks`.
    """
    examples, strips, _ = plan.spans.shape
    row = pl.program_id(3) + (strips * pl.program_id(0) if examples > 1 else 0)
    first, end, full, full_end = (span_ref[4 * row + n] for n in range(4))

    def interior(number: Array) -> Array:
        return (number >= full) & (number < full_end)

    def visit(loop: Any, where: Callable[..., Array], blocks: int = 1, **kind: bool) -> Any:
        def more(loop: Any) -> Array:
            return (loop[0] >= first) & where(*loop) & ~done(loop[1])

        def body(loop: Any) -> Any:
            number = loop[0] + 1 - blocks
            return number - 1, step(number, loop[1], blocks=blocks, **kind)

        return jax.lax.while_loop(more, body, loop)

    loop = visit((end - 1, loop), lambda number, _: ~interior(number), masked=True, saturated=False)
    loop = visit(
        loop, lambda number, x: interior(number) & ~saturated(x), masked=False, saturated=False
    )
    if saturated is not never:

        def enough(number: Array, _: Any) -> Array:
            return interior(number) & (number + 1 - plan.wide >= jnp.maximum(first, full))

        loop = visit(loop, enough, masked=False, saturated=True, blocks=plan.wide)
        if plan.wide > 1:
            loop = visit(loop, lambda number, _: interior(number), masked=False, saturated=True)
    if plan.boundary:
        loop = visit(loop, lambda *_: jnp.asarray(True), masked=True, saturated=False)
    return loop[1]


def never(loop: Any) -> Any:
    """The answer where no row is ever saturated or done."""
    del loop
    return jnp.asarray(False)


class Kernel:
    """One Pallas kernel over all blocks of queries.

    Args:
      plan: the data.
      function: called as `function(graph, *args, loop)` on one tile; returns what follows for
        (loop, totals, on_keys).
      args: what the function reads, a tuple of trees of `Argument`; begins with `plan.data`.
      loop: what passes from one block of keys to the next.
      totals: what is added up over the blocks of keys.
      on_keys: what is added to blocks of keys, over all blocks of queries.
      carry: the encoding's carry for the trees `args` and `loop`.
    """

    def __init__(
        self,
        plan: KernelPlan,
        function: Callable[..., Any],
        args: tuple[PyTree, ...],
        loop: PyTree,
        totals: PyTree,
        on_keys: PyTree,
        carry: Callable[[Any, Any], Carry],
    ):
        self.plan, self.args, self.loop = plan, args, loop
        self.results = (loop, totals, on_keys)
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
        leaves = [jax.tree.leaves(tree, is_leaf=is_argument) for tree in self.results]
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
        tree = (self.plan.params, self.carry(self.args, self.loop))

        def function(graph: Any, params: PyTree, carry: Carry) -> Any:
            return getattr(nnx.merge(graph, params), name)(carry)

        args = specs(tree)
        blank = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            args,
            is_leaf=lambda x: isinstance(x, Spec),
        )
        if jax.eval_shape(functools.partial(function, self.plan.own.graphs[0]), *blank) is None:
            return None
        programs = self.plan.own.programs(
            function, args, Spec((1, 1, self.plan.sizes.queries), jnp.bool_, (2, None))
        )
        return None if programs.program.results[0] is None else programs  # always False

    def _inputs(self) -> list[Argument]:
        """The arguments that some program uses, each once."""
        used: dict[int, Argument] = {}
        step_args = jax.tree.leaves((*self.args, self.loop), is_leaf=is_argument)
        carry_args = jax.tree.leaves(
            (self.plan.params, self.carry(self.args, self.loop)), is_leaf=is_argument
        )
        programs = [(step, step_args) for step in self.steps.values()] + [
            (step, carry_args) for step in self.ask.values()
        ]
        for step, leaves in programs:
            if step is not None:
                arguments = (x for x, use in zip(leaves, step.program.used, strict=True) if use)
                used |= {id(x): x for x in (*arguments, *step.constants)}
        used |= {id(x): x for x in jax.tree.leaves(self.loop, is_leaf=is_argument)}
        return [x for x in used.values() if x.fill is None]

    def _read(self, tree: PyTree, refs: Sequence[Any], first: Any = 0, blocks: int = 1) -> PyTree:
        """Reads the leaves of a tree; a leaf that no program uses becomes 0."""

        def read(x: Argument) -> Any:
            number = self.places.get(id(x))
            if number is None and x.fill is None:
                return np.int32(0)
            return x.read(
                None if number is None else refs[number], self.plan.execution.gathers, first, blocks
            )

        return jax.tree.map(read, tree, is_leaf=is_argument)

    def _body(self, span_ref: Any, *refs: Any) -> None:
        inputs, written = refs[: len(self.inputs)], iter(refs[len(self.inputs) :])
        results = [next(written) if use else None for use in self.written]
        first_strip = pl.program_id(3) == 0
        first_of_group = first_strip & (pl.program_id(2) == 0)
        for x, ref in zip(self.outputs, results, strict=True):
            if ref is not None and x.side != "query":
                shared = x.array.shape[1] == self.plan.groups

                def clear(ref: Any = ref) -> None:
                    def block(number: Array, _: None) -> None:
                        ref[number] = jnp.zeros(ref.shape[1:], ref.dtype)

                    jax.lax.fori_loop(0, ref.shape[0], block, None)

                pl.when(first_of_group if shared else first_strip)(clear)
        (params, queries, keys, drop), *others = self.args[:4], *self.args[4:]
        fixed = self._read((params, queries, drop), inputs)
        rest = self._read(others, inputs)
        constants = {
            id(programs): self._read(programs.constants, inputs)
            for programs in (*self.steps.values(), *self.ask.values())
            if programs
        }
        loops, totals = self.counts[0], slice(self.counts[0], sum(self.counts[:2]))
        tree = jax.tree.structure(self.loop, is_leaf=is_argument)

        def step(first: Array, loop: Any, *, blocks: int, masked: bool, saturated: bool) -> Any:
            programs = self.steps[masked, saturated, blocks]
            own_keys = self._read(keys, inputs, first, blocks)
            args = (
                fixed[0],
                fixed[1],
                own_keys,
                fixed[2],
                *rest,
                jax.tree.unflatten(tree, loop[0]),
            )
            values = programs.program(constants[id(programs)], args)
            new = [
                jnp.zeros_like(old) if x is None else x
                for old, x in zip(loop[0], values[:loops], strict=True)
            ]
            total = [
                old if x is None else old + x.astype(old.dtype)
                for old, x in zip(loop[1], values[totals], strict=True)
            ]
            for x, ref, value in zip(
                self.outputs[totals.stop :],
                results[totals.stop :],
                values[totals.stop :],
                strict=True,
            ):
                if value is not None:
                    x.add_to_keys(ref, first, value, blocks)
            return new, total

        def asking(name: str) -> Callable[..., Any]:
            programs = self.ask[name]
            if programs is None:
                return never

            def ask(loop: Any) -> Array:
                carry = self.carry(
                    (fixed[0], fixed[1], None, fixed[2], *rest), jax.tree.unflatten(tree, loop[0])
                )
                rows: Any = programs.program(constants[id(programs)], (fixed[0], carry))[0]
                return jnp.min(rows.astype(jnp.float32)) > 0.5

            return ask

        zeros = [
            jnp.zeros(x.spec.size, x.spec.dtype) if use else np.int32(0)
            for x, use in zip(self.outputs[totals], self.written[totals], strict=True)
        ]
        start = jax.tree.leaves(self._read(self.loop, inputs)), zeros
        new, total = _visit(self.plan, span_ref, start, step, asking("saturated"), asking("done"))
        for x, ref, value in zip(
            self.outputs[: totals.stop], results[: totals.stop], [*new, *total], strict=True
        ):
            if ref is not None:
                x.write(ref, self.plan.execution.gathers, value, add=x.side == "head")

    def __call__(self, name: str) -> PyTree:
        """Runs the kernel.

        Returns (loop, totals, on_keys) with arrays `[B, heads, blocks, rows, columns]`.
        """
        plan, execution = self.plan, self.plan.execution
        outputs = [x for x, use in zip(self.outputs, self.written, strict=True) if use]
        mesh = jax.sharding.get_abstract_mesh()
        free = {
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto
        }
        devices = mesh.shape[execution.head_axis] if execution.head_axis in free else 1
        axis = execution.head_axis if devices > 1 and plan.groups % devices == 0 else None
        devices = devices if axis else 1
        batch, groups, repeats, strips = plan.grid
        spec = functools.partial(Argument.block_spec, heads=plan.heads, groups=plan.groups)
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, groups // devices, repeats, strips),
            in_specs=[spec(x) for x in self.inputs],
            out_specs=[spec(x) for x in outputs],
        )
        semantics: Any = ("parallel", "parallel", "arbitrary", "arbitrary")

        def shape(x: Argument) -> jax.ShapeDtypeStruct:
            batch, heads, *size = x.array.shape
            return jax.ShapeDtypeStruct(
                (batch, heads // devices if heads > 1 else heads, *size), x.spec.dtype
            )

        call: Callable[..., Any] = pl.pallas_call(
            self._body,
            out_shape=tuple(map(shape, outputs)),
            grid_spec=grid,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES
            ),
            name=name,
            interpret=execution.interpret,
        )
        if free:
            # XLA cannot split a kernel: each device runs it for its own heads, and otherwise all
            # run the same.
            call = jax.shard_map(
                call,
                in_specs=(PartitionSpec(), *(x.partition(axis) for x in self.inputs)),
                out_specs=tuple(x.partition(axis) for x in outputs),
                axis_names=free,
                check_vma=False,
            )
        # An array with one axis is not padded in scalar memory.
        written = iter(call(plan.spans.reshape(-1), *(jnp.asarray(x.array) for x in self.inputs)))
        arrays = [
            next(written) if use else jnp.zeros(x.array.shape, x.spec.dtype)
            for x, use in zip(self.outputs, self.written, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(self.results, is_leaf=is_argument), arrays)
