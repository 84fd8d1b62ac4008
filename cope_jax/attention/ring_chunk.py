"""Attention of the queries of a device in the ring to the keys that have arrived: with kernels, or
by XLA.
"""

import functools
import math
from typing import Any, NamedTuple

from cope_jax.attention import derivative, placement, streaming_gradient, streaming_softmax
from cope_jax.attention.blocks import BlockSizes
from cope_jax.attention.blockwise import SIZES
from cope_jax.attention.kernels.tile import tile_flash
from cope_jax.attention.kernels.tile.tile_plan import Execution
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.attention.request import Request
from cope_jax.attention.ring_schedule import Ring
from cope_jax.attention.stream import Stream, carry_of
from cope_jax.attention.streaming_gradient import Gradients, Residuals
from cope_jax.attention.streaming_softmax import State
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError


class ChunkAttention(NamedTuple):
    """The way in which a device computes attention of a chunk of queries to a chunk of keys.

    Attributes:
      pieces: the number of pieces of a chunk of queries, which are computed one after the other.
      size: the number of queries of a piece.
      execution: how the kernels run; None if XLA computes attention, block by block.
      name: what runs, for the log.
    """

    pieces: int
    size: int
    execution: Execution | None = None
    name: str = "ring"

    def accumulate(self, stream: Stream, state: State) -> State:
        """Computes `streaming_softmax.accumulate`."""
        if self.execution is None:
            return streaming_softmax.accumulate(stream, state)
        kernel = functools.partial(tile_flash.accumulate, execution=self.execution)
        return derivative.by_xla(kernel, streaming_softmax.accumulate)(stream, state)

    def backward(self, stream: Stream, residuals: Residuals, state: Gradients) -> Gradients:
        """Computes `streaming_gradient.backward`."""
        if self.execution is None:
            return streaming_gradient.backward(stream, residuals, state)
        kernel = functools.partial(tile_flash.backward, execution=self.execution)
        return derivative.by_xla(kernel, streaming_gradient.backward)(stream, residuals, state)


def chunk_attention(
    encoding: Encoding, request: Request, ring: Ring, *, resident: int | None, interpret: bool
) -> tuple[ChunkAttention, BlockSizes]:
    """Chooses kernels where there are some for TPUs; also returns the sizes of blocks.

    See `ring.plan`.
    """
    share, name = -(-request.length // ring.chunks), "ring"
    if interpret or placement.current_device() in tpu_attention.CHIPS:
        why = tpu_attention.refusal(encoding, request, resident=resident, interpret=interpret)
        if interpret and why is not None:
            raise ConfigError(f"ring attention cannot interpret kernels, because {why}")
        if why is None:
            return _with_kernels(encoding, request, share, resident, interpret)
        name = f"ring, without kernels, because {why}"
    elif resident is not None:
        raise ConfigError("resident is for kernels of TPUs, and this device has none: leave it out")
    blocks = request.blocks or SIZES
    pieces = -(-share // blocks.queries)
    size = -(-share // pieces)
    return ChunkAttention(pieces, size, name=name), blocks.within(size, pieces * size)


def _with_kernels(
    encoding: Encoding, request: Request, share: int, resident: int | None, interpret: bool
) -> tuple[ChunkAttention, BlockSizes]:
    carry, keys = carry_of(encoding, request), request.keys
    sizes = tpu_attention.sizes_of(
        encoding, carry, request.length, len(keys.indices), request.blocks
    )
    size, sizes, parts = chunk_sizes(share, sizes, keys.k, keys.v, resident)
    execution = tpu_attention.execution_of(size // parts, request.layout.width, interpret)
    return ChunkAttention(1, size, execution, "ring, with kernels"), sizes


def chunk_sizes(
    share: int, sizes: BlockSizes, k: Any, v: Any, resident: int | None = None
) -> tuple[int, BlockSizes, int]:
    """The size of a chunk with `share` tokens, the sizes of its blocks, and the number of parts of
    its keys.

    Parts and blocks divide the chunk. A chunk is hardly longer than its share: what is missing lies
    in the last chunks, whose devices then have less to do.
    """
    unit = math.gcd(sizes.near, tpu_attention.LANES)
    parts, keys = tpu_attention.parts_of(share, sizes._replace(near=unit), k, v, resident)
    size, near = parts * keys, math.gcd(keys, sizes.near)
    return size, BlockSizes(math.gcd(size, sizes.queries), near, max(near, sizes.far)), parts
