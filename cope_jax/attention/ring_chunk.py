"""How a device of the ring computes attention of its queries to the keys that have arrived: with kernels, or by XLA."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from cope_jax.attention import placement, streaming_gradient, streaming_softmax
from cope_jax.attention.blockwise import SIZES
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.kernels.tpu import tpu_attention, tpu_flash
from cope_jax.attention.kernels.tpu.tpu_arguments import Execution
from cope_jax.attention.ring_schedule import Ring
from cope_jax.attention.streaming_gradient import Gradients, Residuals
from cope_jax.attention.streaming_softmax import State
from cope_jax.attention.tiles import BlockSizes, Stream
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError


class ChunkAttention(NamedTuple):
    """How a device computes attention of a chunk of queries to a chunk of keys.

    Attributes:
      pieces: the number of pieces of a chunk of queries, which are computed one after the other.
      size: the number of queries of a piece.
      execution: how the kernels run; None if XLA computes attention, block by block.
    """

    pieces: int
    size: int
    execution: Execution | None = None

    def accumulate(self, stream: Stream, state: State) -> State:
        """Computes `streaming_softmax.accumulate`."""
        if self.execution is None:
            return streaming_softmax.accumulate(stream, state)
        return tpu_flash.accumulate(stream, state, self.execution)

    def backward(self, stream: Stream, residuals: Residuals, state: Gradients) -> Gradients:
        """Computes `streaming_gradient.backward`."""
        if self.execution is None:
            return streaming_gradient.backward(stream, residuals, state)
        return tpu_flash.backward(stream, residuals, state, self.execution)


def chunk_attention(
    encoding: Encoding,
    inputs: Inputs,
    ring: Ring,
    blocks: BlockSizes | None,
    *,
    head_axis: str | None,
    resident: int | None,
    interpret: bool,
) -> tuple[ChunkAttention, BlockSizes]:
    """Chooses kernels where there are some for TPUs; also returns the sizes of blocks. See `ring_attention`."""
    share = -(-inputs.q.shape[2] // ring.chunks)
    if interpret or placement.current_device() in tpu_attention.CHIPS:
        axes: Any = {"head_axis": head_axis, "sequence_axis": ring.axis}
        reason = tpu_attention.why_not(encoding, inputs, blocks, **axes, resident=resident, interpret=interpret)
        if interpret and reason is not None:
            raise ConfigError(f"ring attention cannot interpret kernels, because {reason}")
        placement.log_choice("ring, with kernels" if reason is None else "ring, without kernels", reason)
        if reason is None:
            carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
            sizes = tpu_attention.sizes_of(encoding, carry, inputs.q.shape[2], inputs.v.shape[2], blocks)
            size, sizes, parts = chunk_sizes(share, sizes, inputs.rotated_k, inputs.v, resident)
            execution = dataclasses.replace(tpu_attention.execution_of(size // parts, interpret), head_axis=head_axis)
            return ChunkAttention(1, size, execution), sizes
    elif resident is not None:
        raise ConfigError("resident is for kernels of TPUs, and this device has none: leave it out")
    blocks = blocks or SIZES
    pieces = -(-share // blocks.queries)
    size = -(-share // pieces)
    return ChunkAttention(pieces, size), blocks.within(size, pieces * size)


def chunk_sizes(
    share: int, sizes: BlockSizes, k: Any, v: Any, resident: int | None = None
) -> tuple[int, BlockSizes, int]:
    """The size of a chunk with `share` tokens, the sizes of its blocks, and the number of parts of its keys.

    Parts and blocks divide the chunk. A chunk is hardly longer than its share: what is missing lies in the last chunks,
    whose devices then have less to do.
    """
    unit = math.gcd(sizes.near, tpu_attention.LANES)
    parts, keys = tpu_attention.parts_of(share, sizes._replace(near=unit), k, v, resident)
    size, near = parts * keys, math.gcd(keys, sizes.near)
    return size, BlockSizes(math.gcd(size, sizes.queries), near, max(near, sizes.far)), parts
