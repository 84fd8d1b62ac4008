"""Runs a kernel of tile programs as one Pallas kernel on a TPU."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.kernels.tile.tile_arguments import Argument, is_argument
from cope_jax.attention.kernels.tile.tile_kernel import TileKernel
from cope_jax.attention.kernels.tile.tile_operations import Forms
from cope_jax.attention.kernels.tile.tile_plan import TilePlan
from cope_jax.attention.kernels.tpu.tpu_ops import FORMS, GATHERS

SUBLANES, LANES = 8, 128  # the rows and columns of a register of 32-bit numbers
VMEM_BYTES = 100 * 2**20


@dataclasses.dataclass(frozen=True)
class TpuExecution:
    """The choices by which the kernels run.

    Attributes:
      keys: how many keys are in fast memory at a time.
      gathers: whether the chip gathers within registers.
      head_axis: the axis of the current mesh that splits the heads; None if none does.
      interpret: run on any backend, slowly.
    """

    keys: int
    gathers: bool = True
    head_axis: str | None = None
    interpret: bool = False
    halves = False

    @property
    def forms(self) -> Forms:
        return FORMS | GATHERS if self.gathers else FORMS

    def planning(self) -> AbstractContextManager["TpuExecution"]:
        return nullcontext(self)

    def run(self, kernel: TileKernel, name: str) -> PyTree:
        return PallasKernel(kernel, self)(name)


def _block_spec(x: Argument, heads: int, groups: int) -> pl.BlockSpec:
    """Returns the blocks that program (b, g, r, s) sees, among `heads` query heads and `groups` key
    heads.
    """
    batch, own_heads, *size = x.array.shape
    blocks, repeats = size[0] if x.side == "key" else 1, heads // groups

    def place(b: Array, g: Array, r: Array, s: Array, *_: Any) -> tuple[Any, ...]:
        head = 0 if own_heads == 1 else g * repeats + r if own_heads == heads else g
        return b if batch > 1 else 0, head, s if x.side == "query" else 0, 0, 0

    return pl.BlockSpec((None, None, blocks, *size[1:]), place)


def _partition(x: Argument, axis: str | None) -> PartitionSpec:
    """Returns the axes of the mesh that split the array."""
    return PartitionSpec(None, axis if x.array.shape[1] > 1 else None)


def _read(x: Argument, ref: Any, gathers: bool, first: Any = 0, blocks: int = 1) -> Array:
    """Reads blocks of keys from `first` on, or the own block of a query or head."""
    if x.fill is not None:
        return jnp.full(x.spec.size, x.fill, x.spec.dtype)
    parts = [ref[first + n] for n in range(blocks)] if x.side == "key" else [ref[0]]
    array = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=x.along)
    return _as_column(array, gathers) if x.turned else array


def _write(x: Argument, ref: Any, array: Array, *, add: bool) -> None:
    """Writes the own block of a query or head."""
    array = (_as_row(array) if x.turned else array).astype(ref.dtype)
    ref[0] = ref[0] + array if add else array


def _add_to_keys(x: Argument, ref: Any, first: Any, array: Array, blocks: int) -> None:
    """Adds to blocks of keys from `first` on."""
    size = array.shape[x.along] // blocks
    for n in range(blocks):
        ref[first + n] += jax.lax.slice_in_dim(
            array, n * size, (n + 1) * size, axis=x.along
        ).astype(ref.dtype)


def _as_column(x: Array, gathers: bool) -> Array:
    """A row as a column; a chip that cannot gather transposes registers, which takes longer."""
    if gathers:
        return x.reshape(x.shape[::-1])
    return jnp.broadcast_to(x, (SUBLANES, max(x.shape[1], SUBLANES))).T[: x.shape[1], :1]


def _as_row(x: Array) -> Array:
    """A column as a row: the sums over the rows of a diagonal, as a reshape takes many more steps."""

    def turned(column: Array) -> Array:
        size = (len(column),) * 2
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, size, axis) for axis in (0, 1))
        diagonal = jnp.where(rows == columns, column, jnp.zeros_like(column))
        return jnp.sum(diagonal, axis=0, keepdims=True, dtype=x.dtype)

    return jnp.concatenate(
        [turned(x[first : first + LANES]) for first in range(0, len(x), LANES)], axis=1
    )


def _visit(
    plan: TilePlan,
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


class PallasKernel:
    """A `TileKernel` as a Pallas kernel.

    What passes from one block of keys to the next lies in fast memory, if it has several columns: in
    registers, each loop would move all of it. `kept` tells which outputs those are.
    """

    def __init__(self, kernel: TileKernel, execution: TpuExecution):
        self.kernel, self.plan, self.execution = kernel, kernel.plan, execution
        self.inputs, self.outputs = kernel.inputs, kernel.outputs
        passed = sum(kernel.counts[:2])
        self.kept = [
            use and x.spec.size[1] > 1
            for x, use in zip(kernel.outputs[:passed], kernel.written[:passed], strict=True)
        ]

    def _read(self, tree: PyTree, refs: Sequence[Any], first: Any = 0, blocks: int = 1) -> PyTree:
        """Reads the leaves of a tree; a leaf that no program uses becomes 0."""

        def read(x: Argument) -> Any:
            number = self.kernel.places.get(id(x))
            if number is None and x.fill is None:
                return np.int32(0)
            ref = None if number is None else refs[number]
            return _read(x, ref, self.execution.gathers, first, blocks)

        return jax.tree.map(read, tree, is_leaf=is_argument)

    def _body(self, span_ref: Any, *refs: Any) -> None:
        last = len(self.inputs) + sum(self.kernel.written)
        inputs, written = refs[: len(self.inputs)], iter(refs[len(self.inputs) : last])
        results = [next(written) if use else None for use in self.kernel.written]
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
        params, queries, keys, *others = self.kernel.args
        fixed = self._read((params, queries, None, *others), inputs)
        constants = {
            id(programs): self._read(programs.constants, inputs)
            for programs in (*self.kernel.steps.values(), *self.kernel.ask.values())
            if programs
        }
        loops, passed = self.kernel.counts[0], sum(self.kernel.counts[:2])
        totals = slice(loops, passed)
        tree = jax.tree.structure(self.kernel.loop, is_leaf=is_argument)

        def load(columns: list[Any]) -> tuple[list[Any], list[Any]]:
            memory, unkept = iter(refs[last:]), iter(columns)
            values = [next(memory)[...] if kept else next(unkept) for kept in self.kept]
            return values[:loops], values[totals]

        def save(new: list[Any], total: list[Any]) -> list[Any]:
            """Writes what is kept, and returns the others."""
            memory, columns = iter(refs[last:]), []
            for value, kept in zip([*new, *total], self.kept, strict=True):
                if kept:
                    next(memory)[...] = value
                else:
                    columns.append(value)
            return columns

        def step(
            first: Array, columns: list[Any], *, blocks: int, masked: bool, saturated: bool
        ) -> Any:
            loop = load(columns)
            programs = self.kernel.steps[masked, saturated, blocks]
            block = self._read(keys, inputs, first, blocks)
            args = *fixed[:2], block, *fixed[3:], jax.tree.unflatten(tree, loop[0])
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
                    _add_to_keys(x, ref, first, value, blocks)
            return save(new, total)

        def asking(name: str) -> Callable[..., Any]:
            programs = self.kernel.ask[name]
            if programs is None:
                return never

            def ask(columns: list[Any]) -> Array:
                loop = jax.tree.unflatten(tree, load(columns)[0])
                carry = self.kernel.carry(fixed, loop)
                rows: Any = programs.program(constants[id(programs)], (fixed[0], carry))[0]
                return jnp.min(rows.astype(jnp.float32)) > 0.5

            return ask

        zeros = [
            jnp.zeros(x.spec.size, x.spec.dtype) if use else np.int32(0)
            for x, use in zip(self.outputs[totals], self.kernel.written[totals], strict=True)
        ]
        start = save(jax.tree.leaves(self._read(self.kernel.loop, inputs)), zeros)
        columns = _visit(self.plan, span_ref, start, step, asking("saturated"), asking("done"))
        new, total = load(columns)
        for x, ref, value in zip(
            self.outputs[: totals.stop], results[: totals.stop], [*new, *total], strict=True
        ):
            if ref is not None:
                _write(x, ref, value, add=x.side == "head")

    def __call__(self, name: str) -> PyTree:
        """Runs the kernel.

        Returns (loop, totals, on_keys) with arrays `[B, heads, blocks, rows, columns]`.
        """
        plan, execution = self.plan, self.execution
        outputs = [x for x, use in zip(self.outputs, self.kernel.written, strict=True) if use]
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
        spec = functools.partial(_block_spec, heads=plan.heads, groups=plan.groups)
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, groups // devices, repeats, strips),
            in_specs=[spec(x) for x in self.inputs],
            out_specs=[spec(x) for x in outputs],
            scratch_shapes=[
                pltpu.VMEM(x.spec.size, x.spec.dtype)
                for x, kept in zip(self.outputs, self.kept, strict=False)
                if kept
            ],
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
                in_specs=(PartitionSpec(), *(_partition(x, axis) for x in self.inputs)),
                out_specs=tuple(_partition(x, axis) for x in outputs),
                axis_names=free,
                check_vma=False,
            )
        # An array with one axis is not padded in scalar memory.
        written = iter(call(plan.spans.reshape(-1), *(jnp.asarray(x.array) for x in self.inputs)))
        arrays = [
            next(written) if use else jnp.zeros(x.array.shape, x.spec.dtype)
            for x, use in zip(self.outputs, self.kernel.written, strict=True)
        ]
        return jax.tree.unflatten(
            jax.tree.structure(self.kernel.results, is_leaf=is_argument), arrays
        )
