"""How a device of the ring computes attention of its queries to the keys that have arrived: with kernels, or by XLA."""

import dataclasses
import math
from typing import NamedTuple

import jax

from cope_jax.attention import fused, streaming_gradient, streaming_softmax
from cope_jax.attention.blockwise import SIZES
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.kernels import tpu
from cope_jax.attention.kernels.tpu_arguments import Execution
from cope_jax.attention.ring_schedule import Ring
from cope_jax.attention.streaming_gradient import Gradients, Residuals
from cope_jax.attention.streaming_softmax import State
from cope_jax.attention.tiles import BlockSizes, Stream
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError


class Inner(NamedTuple):
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
        return tpu.accumulate(stream, state, self.execution)

    def backward(self, stream: Stream, residuals: Residuals, state: Gradients) -> Gradients:
        """Computes `streaming_gradient.backward`."""
        if self.execution is None:
            return streaming_gradient.backward(stream, residuals, state)
        return tpu.backward(stream, residuals, state, self.execution)


def choose(
    encoding: Encoding,
    inputs: Inputs,
    ring: Ring,
    blocks: BlockSizes | None,
    *,
    head_axis: str | None,
    resident: int | None,
    interpret: bool,
) -> tuple[Inner, BlockSizes]:
    """Chooses kernels where there are some for TPUs; also returns the sizes of blocks. See `ring_attention`."""
    share = -(-inputs.q.shape[2] // ring.chunks)
    if interpret or fused.current_device() in fused.CHIPS:
        reason = fused.why_not(
            encoding,
            inputs,
            blocks,
            batch_axes=(ring.axis,),
            head_axis=head_axis,
            resident=resident,
            interpret=interpret,
        )
        if interpret and reason is not None:
            raise ConfigError(f"ring attention cannot interpret kernels, because {reason}")
        fused.log_choice("ring, with kernels" if reason is None else "ring, without kernels", reason)
        if reason is None:
            carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
            sizes = fused.sizes_of(encoding, carry, share, share, blocks)
            parts, _ = fused.parts_of(share, sizes, inputs.rotated_k, inputs.v, resident)
            unit = math.lcm(sizes.queries, sizes.near * parts)
            size = -(-share // unit) * unit
            execution = fused.execution_of(size // parts, interpret)
            return Inner(1, size, dataclasses.replace(execution, head_axis=head_axis)), sizes
    blocks = blocks or SIZES
    pieces = -(-share // blocks.queries)
    size = -(-share // pieces)
    return Inner(pieces, size), blocks.within(size, pieces * size)
