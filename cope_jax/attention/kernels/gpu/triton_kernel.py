"""Runs a kernel of tile programs as two kernels in Triton.

A program of the first has a block of queries of a head, and visits the blocks of keys from the
nearest to the farthest. It writes what belongs to its queries, and its share of what is summed over
all queries of a head. The second computes what is added to keys: a program has a chunk of keys, and
visits all blocks of queries. So no two programs add to one number, and results are the same in every
run. What passes from one block of keys to the next is stored by the first where a chunk begins.
"""

import dataclasses
import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.kernels.gpu.triton_programs import TritonPrograms
from cope_jax.attention.kernels.tile.tile_arguments import Argument, is_argument
from cope_jax.attention.kernels.tile.tile_graph import FORMS
from cope_jax.attention.kernels.tile.tile_kernel import TileKernel
from cope_jax.attention.kernels.tile.tile_operations import Forms

IMPORTS = """import triton
import triton.language as tl

from cope_jax.attention.kernels.gpu.triton_operations import *

"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel.

    Attributes:
      name: of the kernel in its text.
      text: the module that defines it; its arguments are arrays, then results.
      programs: how many run.
      results: what it writes.
      zeroed: the places of the results that it adds to, and that must be 0 before.
      blocks: the numbers of queries and of keys of a block.
      warps, stages, capability: how Triton compiles it.
    """

    name: str
    text: str
    programs: int
    results: tuple[jax.ShapeDtypeStruct, ...]
    zeroed: tuple[int, ...]
    blocks: tuple[int, int]
    warps: int
    stages: int
    capability: int | None

    @property
    def function(self) -> Any:
        """The kernel, for Triton."""
        return _function(self.name, self.text)


@functools.lru_cache(maxsize=1024)
def _function(name: str, text: str) -> Any:
    """The function of this name in a module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = f"<{name} {digest}>"  # where Triton finds its text
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, file, "exec"), names)
    return names[name]


@dataclasses.dataclass(frozen=True)
class GpuExecution:
    """Runs kernels in Triton.

    Attributes:
      keys: the number of keys.
      precision: of products of float32, as Triton names it.
      warps, stages, capability: as in `Launch`.
      launch: runs a kernel, called as `launch(Launch, *arrays)`; returns what it writes.
    """

    keys: int
    precision: str
    warps: int
    stages: int
    capability: int | None
    launch: Callable[..., Any]
    halves = False

    @property
    def forms(self) -> Forms:
        return FORMS

    def planning(self) -> AbstractContextManager["GpuExecution"]:
        return nullcontext(self)

    def run(self, kernel: TileKernel, name: str) -> PyTree:
        """Runs both kernels."""
        programs, plan = TritonPrograms(kernel, self.precision), kernel.plan
        inputs, spans = [_given(x) for x in kernel.inputs], plan.spans.reshape(-1)
        by_queries = [*range(len(programs.loop)), *programs.totals]
        shapes = [_shape(programs, n) for n in by_queries]
        zeroed = tuple(by_queries.index(n) for n in programs.in_memory)
        states: list[jax.ShapeDtypeStruct] = _states(programs) if programs.on_keys else []
        launch = functools.partial(self._launch, kernel)
        written = launch(name, programs.of_queries(), [*shapes, *states], zeroed)(spans, *inputs)
        arrays: dict[int, Array] = dict(zip(by_queries, written, strict=False))
        if programs.on_keys:
            shapes = [_shape(programs, n) for n in programs.on_keys]
            zeroed = tuple(range(len(shapes))) if programs.loop else ()
            call = launch(f"{name}_of_keys", programs.of_keys(), shapes, zeroed)
            more = call(spans, _strips(programs), *written[len(by_queries) :], *inputs)
            arrays |= dict(zip(programs.on_keys, more, strict=True))
        results = [
            _result(x, arrays[n]) if n in arrays else jnp.zeros(x.array.shape, x.spec.dtype)
            for n, x in enumerate(kernel.outputs)
        ]
        return jax.tree.unflatten(jax.tree.structure(kernel.results, is_leaf=is_argument), results)

    def _launch(
        self,
        kernel: TileKernel,
        name: str,
        printed: tuple[int, str, list[str]],
        shapes: Sequence[jax.ShapeDtypeStruct],
        zeroed: tuple[int, ...],
    ) -> Callable[..., Any]:
        programs, arguments, lines = printed
        head = f"@triton.jit\ndef {name}({arguments}):\n"
        text = IMPORTS + head + "".join(f"    {line}\n" for line in lines)
        blocks, how = kernel.plan.sizes, (self.warps, self.stages, self.capability)
        sizes = blocks.queries, blocks.near
        launch = Launch(name, text, programs, tuple(shapes), zeroed, sizes, *how)
        return jax.custom_batching.sequential_vmap(functools.partial(self.launch, launch))


def _given(x: Argument) -> Array:
    """An array as the kernels read it: conditions and unsigned numbers are integers."""
    array = x.stored
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(array, jnp.int32) if array.dtype == jnp.uint32 else array


def _shape(programs: TritonPrograms, n: int) -> jax.ShapeDtypeStruct:
    """The shape of a result as a kernel writes it; each block of queries writes a share of sums."""
    x = programs.kernel.outputs[n]
    shape = x.stored_shape
    if x.side == "head":
        shape = (*shape[:2], programs.strips, *shape[3:])
    return jax.ShapeDtypeStruct(shape, x.spec.dtype)


def _states(programs: TritonPrograms) -> list[jax.ShapeDtypeStruct]:
    """For each block of queries the block of keys after the last that it visited, and what passes to
    each chunk.
    """
    rows = programs.plan.batch, programs.plan.heads, programs.strips
    return [
        jax.ShapeDtypeStruct(rows, jnp.int32),
        *(
            jax.ShapeDtypeStruct((*rows, programs.chunks, *x.spec.size), x.spec.dtype)
            for x in programs.loop
        ),
    ]


def _result(x: Argument, array: Array) -> Array:
    return array.sum(axis=2, keepdims=True) if x.side == "head" else x.restored(array)


def _strips(programs: TritonPrograms) -> Array:
    """The first block of queries that sees a chunk of keys, and the number after the last."""
    spans = programs.plan.spans[:, None]  # example, chunk, block of queries, number
    first = programs.chunk * jnp.arange(programs.chunks)[None, :, None]
    sees = (spans[..., 0] < first + programs.chunk) & (spans[..., 1] > first)
    end = jnp.where(sees.any(-1), programs.strips - jnp.argmax(sees[..., ::-1], -1), 0)
    return jnp.stack([jnp.argmax(sees, -1), end], -1).astype(jnp.int32).reshape(-1)
