"""Attention on TPUs: runs the two kernels of `tpu_flash` over whole blocks of queries and of keys."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from cope_jax.array_types import Array
from cope_jax.attention import placement, streaming_gradient, streaming_softmax
from cope_jax.attention.blockwise import RESIDUALS
from cope_jax.attention.inputs import Inputs, head_major
from cope_jax.attention.kernels.tile.tile_values import NotATile
from cope_jax.attention.kernels.tpu import tpu_flash
from cope_jax.attention.kernels.tpu.tpu_arguments import Execution
from cope_jax.attention.streaming_gradient import KeyGradients, Residuals
from cope_jax.attention.tiles import BlockSizes, Stream, along_sequence, needs_one_block, pad_by
from cope_jax.encodings import Carry, Encoding
from cope_jax.errors import ConfigError

SUBLANES, LANES = 16, 128  # blocks of queries and of keys are multiples of these
CHIPS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "tpu_sizes.json").read_text())
"""For each kind of device: the sizes of blocks, for encodings that accumulate over the keys or have a heavy score, and
for others; how many keys are in fast memory at a time (`resident`); and whether the chip gathers within registers."""
SPAN_BYTES = 3 * 2**18  # of a TPU's scalar memory, which has 2**20; a block of queries takes 16


def attention(
    encoding: Encoding,
    inputs: Inputs,
    blocks: BlockSizes | None = None,
    *,
    head_axis: str | None = None,
    resident: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes the result of `blockwise_attention`; see `fused_attention`. Call it only if `why_not` is None."""
    stream, execution = _prepare(encoding, inputs, blocks, resident, interpret)
    execution = dataclasses.replace(execution, head_axis=head_axis)
    return head_major(_attend(execution, stream)[:, :, : inputs.q.shape[2]])


def why_not(
    encoding: Encoding,
    inputs: Inputs,
    blocks: BlockSizes | None = None,
    *,
    batch_axes: Sequence[str] = (),
    head_axis: str | None = None,
    sequence_axis: str | None = None,
    resident: int | None = None,
    interpret: bool = False,
) -> str | None:
    """Returns why `attention` cannot run, or kernels within `ring_attention`; None if they can.

    The axes are as in `attend`.
    """
    device = placement.current_device()
    if not interpret and device not in CHIPS:
        return f"there is no kernel for the device {device!r}"
    if not interpret and blocks is not None and (blocks.queries % SUBLANES or blocks.near % LANES):
        return f"blocks must have a multiple of {SUBLANES} queries and of {LANES} keys, got {tuple(blocks)}"
    axes = (*batch_axes, sequence_axis)
    if not interpret and (reason := placement.why_undivided(axes, head_axis, inputs.rotated_k.shape[1])):
        return reason
    if not encoding.traits.splits_queries or needs_one_block(encoding, inputs):
        return "the encoding needs all keys in one block"
    if inputs.mask.given_B1LM is not None:
        return "a mask is given, and the kernels know only causality, windows and segments"
    if 0 in inputs.q.shape or 0 in inputs.v.shape:
        return "there are no queries or no keys"
    if not interpret and any(
        x.dtype not in (jnp.float32, jnp.bfloat16) for x in (inputs.q, inputs.rotated_k, inputs.v)
    ):
        return f"the type is {inputs.q.dtype}, not float32 or bfloat16"
    ids = inputs.mask.q_segment_ids_BL, inputs.mask.k_segment_ids_BM
    if any(x.dtype != jnp.int32 for x in (*ids, inputs.q_positions, inputs.k_positions) if x is not None):
        return "segment ids and positions must be int32"
    execution, stream = _shapes(encoding, inputs, blocks, resident, interpret)
    mesh = jax.sharding.get_abstract_mesh()
    free = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    examples = len(inputs.q) // math.prod(mesh.shape[axis] for axis in batch_axes if axis in free)
    chunks = 1 if sequence_axis is None else 2 * mesh.shape[sequence_axis]
    strips = -(-inputs.q.shape[2] // (chunks * stream.sizes.queries))
    if 16 * strips * (1 if ids[0] is None else examples) > SPAN_BYTES:
        return f"the scalar memory does not hold what {examples} × {strips} blocks of queries see"
    leaves, tree = jax.tree.flatten(stream)
    reason = _refusal(execution, tree, tuple((x.shape, x.dtype) for x in leaves))
    return reason and f"{reason} on {device}"


def _shapes(encoding: Encoding, inputs: Inputs, *options: Any) -> tuple[Execution, Stream]:
    """The shapes that `_prepare` gives, without computing anything."""
    execution: list[Execution] = []

    def stream() -> Stream:
        stream, own = _prepare(encoding, inputs, *options)
        execution.append(own)
        return stream

    shapes = jax.eval_shape(stream)
    return execution[0], shapes


@functools.lru_cache(maxsize=256)
def _refusal(execution: Execution, tree: Any, avals: tuple[Any, ...]) -> str | None:
    """Why the kernels cannot be built for a stream with this structure and these shapes."""

    def build(stream: Stream) -> None:
        tpu_flash.accumulate(stream, streaming_softmax.start(stream, gradient=False), execution)
        state = tpu_flash.accumulate(stream, streaming_softmax.start(stream, gradient=True), execution)
        dout, sums = state.weighted.astype(stream.keys.v.dtype), state.slope_total
        residuals = Residuals(dout, state.total, state.total, sums)
        start = streaming_gradient.start(stream, residuals, KeyGradients.zeros(stream.keys))
        tpu_flash.backward(stream, residuals, start, execution)

    try:
        jax.eval_shape(build, jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*aval) for aval in avals]))
    except NotATile as reason:
        return str(reason)
    except (ConfigError, NotImplementedError, TypeError, ValueError) as error:  # what tracing of a hook may raise
        return f"its hooks cannot be traced in a kernel ({str(error).splitlines()[0]})"
    return None


def sizes_of(
    encoding: Encoding, carry: Carry, length: int, keys: int, blocks: Sequence[int] | None = None
) -> BlockSizes:
    """Returns the sizes of blocks; by default those of the chip: small for a carry or a heavy score, else large."""
    small = encoding.traits.heavy_score or jax.tree.leaves(carry)
    chosen = blocks or _chip()["small" if small else "large"]
    queries, near, far = chosen
    near = min(near, -(-keys // LANES) * LANES) if near % LANES == 0 else near
    return BlockSizes(min(queries, -(-length // SUBLANES) * SUBLANES), near, max(near, far))


def _chip() -> dict[str, Any]:
    """The entry of `CHIPS` of the current device; where kernels are only interpreted, that of a v5e."""
    return CHIPS.get(placement.current_device(), CHIPS["TPU v5 lite"])


def parts_of(keys: int, sizes: BlockSizes, k: Array, v: Array, resident: int | None = None) -> tuple[int, int]:
    """In how many parts the keys are read into fast memory, and how many keys a part has: whole blocks.

    The chip's own number is for keys of up to 256 bytes; fewer longer ones fit.
    """
    if resident is None:
        size = max(-(-x.shape[-1] // LANES) * LANES * x.dtype.itemsize for x in (k, v))
        resident = max(_chip()["resident"] * 256 // max(size, 256), sizes.near)
    parts = -(-keys // resident)
    return parts, -(-keys // (parts * sizes.near)) * sizes.near


def _prepare(
    encoding: Encoding, inputs: Inputs, blocks: BlockSizes | None, resident: int | None, interpret: bool
) -> tuple[Stream, Execution]:
    """The stream, with whole blocks of queries, and whole parts of keys."""
    length, keys = inputs.q.shape[2], inputs.v.shape[2]
    carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
    sizes = sizes_of(encoding, carry, length, keys, blocks)
    parts, resident = parts_of(keys, sizes, inputs.rotated_k, inputs.v, resident)
    stream = Stream.of(encoding, inputs, sizes, one_block=False, padding=-length % sizes.queries)
    missing = parts * resident - keys
    if missing:
        padded = along_sequence(pad_by(missing), stream.keys)
        indices = jnp.pad(stream.keys.indices, (0, missing), constant_values=-1)
        stream = stream.part(stream.queries, dataclasses.replace(padded, indices=indices))
    return stream, execution_of(resident, interpret)


def execution_of(keys: int, interpret: bool) -> Execution:
    """How the kernels run on the current device, with `keys` keys in fast memory at a time."""
    return Execution(keys, _chip()["gathers"], interpret=interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(execution: Execution, stream: Stream) -> Array:
    return _forward_pass(execution, stream, gradient=False)[0]


def _forward_pass(execution: Execution, stream: Stream, gradient: bool) -> tuple[Array, Array, tuple[Array, ...]]:
    state = tpu_flash.accumulate(stream, streaming_softmax.start(stream, gradient), execution, first=True)
    return streaming_softmax.finish(stream, state)


def _forward(execution: Execution, stream: Stream) -> tuple[Array, Any]:
    result = checkpoint_name(_forward_pass(execution, stream, gradient=True), RESIDUALS)
    return result[0], (stream, *result)


def _backward(execution: Execution, kept: Any, dout_BHLK: Array) -> tuple[Any]:
    stream, *result = kept
    residuals = Residuals.of(dout_BHLK, *result)
    state = streaming_gradient.start(stream, residuals, KeyGradients.zeros(stream.keys))
    state = tpu_flash.backward(stream, residuals, state, execution)
    dparams, dqueries = streaming_gradient.finish(stream, residuals, state)
    return (streaming_gradient.of(stream, dparams, dqueries.of(stream.queries), state.keys.of(stream.keys)),)


_attend.defvjp(_forward, _backward)
