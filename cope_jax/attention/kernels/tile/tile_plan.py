"""Facts that a kernel of tile programs knows before it runs: the encoding by head, the arguments,
the spans of keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.blocks import KeyBlock, QueryBlock
from cope_jax.attention.kernels.tile.tile_arguments import Argument, leaves_of, of_block, of_head
from cope_jax.attention.kernels.tile.tile_operations import Forms
from cope_jax.attention.kernels.tile.tile_program import TileProgram
from cope_jax.attention.kernels.tile.tile_values import NotATile, Spec
from cope_jax.attention.mask import Mask
from cope_jax.attention.stream import Stream
from cope_jax.encodings import Encoding
from cope_jax.ops.dropout import Dropout


class Execution(Protocol):
    """The way in which a backend runs kernels; hashable, because it is known while tracing."""

    def __hash__(self) -> int: ...

    @property
    def keys(self) -> int:
        """The number of keys that a kernel without halves sees at a time."""

    @property
    def forms(self) -> Forms:
        """The operations of `cope_jax.ops` that it has, on arrays `[rows, columns]`."""

    @property
    def halves(self) -> bool:
        """True if kernels have halves, see `tile_strip`."""

    def planning(self) -> "AbstractContextManager[Execution]":
        """A context of the same execution in which `run` only begins to compile kernels; at its end
        all are compiled.

        Raises:
          NotATile: at the end; a kernel cannot be compiled.
        """

    def run(self, kernel: Any, name: str) -> PyTree:
        """Runs a `TileKernel`: returns its results, `[B, heads, blocks, rows, columns]`, or with all
        columns as one block. Those of a kernel with halves are those of the second half, and
        `on_keys`, and may have the narrower type that their reader takes, see `Argument.array`.
        """


class Heads:
    """The encoding by head: one structure, with the parameters of all heads stacked."""

    def __init__(self, encoding: Encoding, forms: Forms):
        self.forms = forms
        self.each = [nnx.split(alone) for alone in _heads(encoding)]
        self.graphs = [graph for graph, _ in self.each]
        self.same = all(graph == self.graphs[0] for graph in self.graphs)

    @staticmethod
    def params(graph: Any, params: PyTree) -> PyTree:
        """The parameters of all heads, each `[1, H, ...]`."""
        encoding: Encoding = nnx.merge(graph, params)
        each = [nnx.split(alone)[1] for alone in _heads(encoding)]
        return jax.tree.map(
            lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves])[None], *each
        )

    def programs(self, function: Callable[..., Any], args: PyTree, results: PyTree) -> "Programs":
        """The tile program of `function(graph, *args)` for each head."""
        graphs = self.graphs[:1] if self.same else self.graphs
        by_head = [
            TileProgram(self.forms, functools.partial(function, graph), args, results)
            for graph in graphs
        ]
        if any(program.text != by_head[0].text for program in by_head):
            raise NotATile("the heads of this encoding compute different things")
        constants = [
            np.stack(arrays)[None]
            for arrays in zip(*(program.constants for program in by_head), strict=True)
        ]
        return Programs(by_head[0], [of_head(x, x.shape[2:]) for x in constants])


def _heads(encoding: Encoding) -> list[Encoding]:
    shape = encoding.shape
    return [encoding.of_head(h, shape) for h in range(shape.num_heads)]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The tile program of all heads, and the constants of each head."""

    program: TileProgram
    constants: list[Argument]

    def reads(self, args: PyTree) -> list[Argument]:
        """Returns what the program reads: its constants, and those of `args` that it uses."""
        uses = zip(leaves_of(args), self.program.used, strict=True)
        return [*self.constants, *(x for x, use in uses if use)]


class TilePlan:
    """The data of both kernels: the arguments, and the order in which blocks of keys are visited."""

    def __init__(self, stream: Stream, execution: Execution):
        self.execution = execution
        self.stream, self.sizes = stream, stream.sizes
        self.batch, self.heads, length = stream.queries.q.shape[:3]
        self.groups, keys = stream.keys.k.shape[1:3]
        self.grid = (
            self.batch,
            self.groups,
            self.heads // self.groups,
            length // self.sizes.queries,
        )
        encoding = stream.encoding(stream.params)
        self.own = Heads(encoding, execution.forms)
        queries, near = self.sizes.queries, self.sizes.near
        self.wide = max(1, min(self.sizes.far, keys) // near)
        self.params = jax.tree.map(
            lambda x: of_head(x, x.shape[2:]), Heads.params(stream.graph, stream.params)
        )
        hidden = dataclasses.replace(stream.queries, v=None)
        self.queries: Any = of_block(hidden, queries, "query")
        self.keys: Any = of_block(stream.keys, near, "key")
        self.drop: Any = None
        if stream.drop is not None:
            seeds = jnp.moveaxis(stream.drop.keys_2BH, 0, -1)[..., None]
            seed = Argument(seeds[:, :, None], Spec((2, 1, 1), seeds.dtype, (0, None)), "head")
            arguments: Any = {"keys_2BH": seed}
            self.drop = dataclasses.replace(stream.drop, **arguments)
        self.data = (self.params, self.queries, self.keys, self.drop)
        self.spans, self.boundary = _block_spans(stream)

    def tile(
        self, graph: Any, params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None
    ) -> Stream:
        """One block of queries and one of keys, of one head."""
        request = dataclasses.replace(self.stream.request, queries=queries, keys=keys, drop=drop)
        return dataclasses.replace(self.stream, params=params, request=request, graph=graph)


def _block_spans(stream: Stream) -> tuple[Array, bool]:
    """For each example and block of queries the span of `Mask.span` in blocks of keys,
    `[B or 1, S, 4]`.

    Also returns whether there can be blocks with hidden pairs beyond those without.
    """
    request, queries, keys, sizes = stream.request, stream.queries, stream.keys, stream.sizes
    q_ids, k_ids = queries.segment_ids, keys.segment_ids

    def span(indices_L: Array, q_ids_L: Any, k_ids_M: Any) -> Array:
        ids: Any = (None, None) if q_ids_L is None else (q_ids_L[None], k_ids_M[None])
        first, end, full, full_end = Mask(
            indices_L, keys.indices, ids[0], ids[1], None, request.causal, request.window
        ).span()
        near = sizes.near
        return jnp.stack([first // near, -(-end // near), -(-full // near), full_end // near])

    indices_SL = queries.indices.reshape(-1, sizes.queries)
    if q_ids is None or k_ids is None:
        spans = jax.vmap(lambda indices_L: span(indices_L, None, None))(indices_SL)[None]
    else:
        q_ids = q_ids.reshape(len(q_ids), -1, sizes.queries)
        of_example = jax.vmap(span, (0, 0, None))
        both = jnp.broadcast_shapes(q_ids.shape[:1], k_ids.shape[:1])
        q_ids, k_ids = (jnp.broadcast_to(x, (*both, *x.shape[1:])) for x in (q_ids, k_ids))
        spans = jax.vmap(of_example, (None, 0, 0))(indices_SL, q_ids, k_ids)
    return spans.astype(
        jnp.int32
    ), request.window is not None or q_ids is not None or not request.causal
