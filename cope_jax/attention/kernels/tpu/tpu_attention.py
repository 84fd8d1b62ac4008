"""Attention on TPUs: runs the two kernels of `tile_flash` over blocks of queries and of keys."""

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from cope_jax.array_types import Array
from cope_jax.attention import placement
from cope_jax.attention.blocks import BlockSizes, head_major
from cope_jax.attention.kernels.tile import tile_attention
from cope_jax.attention.kernels.tpu.tpu_kernel import TpuExecution
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.attention.stream import Stream, carry_of
from cope_jax.encodings import Carry, Encoding

SUBLANES, LANES = 16, 128  # blocks of queries and of keys are multiples of these
CHIPS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "tpu_sizes.json").read_text()
)
"""For each kind of device: the sizes of blocks, for encodings that accumulate over the keys or have
a heavy score, and for others; how many keys are in fast memory at a time (`resident`); and whether
the chip gathers within registers."""
SPAN_BYTES = 3 * 2**18  # of a TPU's scalar memory, which has 2**20; a block of queries takes 16


def plan(
    encoding: Encoding, request: Request, *, resident: int | None = None, interpret: bool = False
) -> Plan | Reason:
    """Returns the plan to compute the result of `blockwise_attention` with kernels, or why this is
    not possible.

    Args:
      encoding: the encoding.
      request: the request. In its `blocks`, blocks of keys have the size `far` where all rows are
        saturated, else `near`. If it has none, the sizes are those of the chip.
      resident: how many keys are in fast memory at a time. If None, the number is that of the chip.
      interpret: run the kernels on any backend, slowly.
    """
    if why := refusal(encoding, request, resident=resident, interpret=interpret):
        return Reason(why)

    def run() -> Array:
        make_stream, execution = _prepare(encoding, request, resident, interpret)
        return head_major(tile_attention.attend(execution, make_stream())[:, :, : request.length])

    return Plan("fused", run)


def refusal(
    encoding: Encoding, request: Request, *, resident: int | None, interpret: bool
) -> str | None:
    """Returns why the kernels cannot run, alone or within ring attention; None if they can."""
    why = None if interpret else _refusal_of_chip(request)
    return (
        why
        or tile_attention.why_no_kernels(encoding, request)
        or _refusal_of_hooks(encoding, request, resident, interpret)
    )


def _refusal_of_chip(request: Request) -> str | None:
    device, blocks, layout = placement.current_device(), request.blocks, request.layout
    queries, keys = request.queries, request.keys
    if device not in CHIPS:
        return f"there is no kernel for the device {device!r}"
    if blocks is not None and (blocks.queries % SUBLANES or blocks.near % LANES):
        return f"blocks must have a multiple of {SUBLANES} queries and of {LANES} keys, got {tuple(blocks)}"
    if any(x.dtype not in (jnp.float32, jnp.bfloat16) for x in (queries.q, keys.k, keys.v)):
        return f"the type is {queries.q.dtype}, not float32 or bfloat16"
    return placement.why_undivided((*layout.batch, layout.length), layout.width, keys.k.shape[2])


def _refusal_of_hooks(
    encoding: Encoding, request: Request, resident: int | None, interpret: bool
) -> str | None:
    make_stream, execution = _prepare(encoding, request, resident, interpret)
    stream = jax.eval_shape(make_stream)
    mesh, layout, segments = (
        jax.sharding.get_abstract_mesh(),
        request.layout,
        request.keys.segment_ids,
    )
    free = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    examples = len(request.queries.q) // math.prod(
        mesh.shape[axis] for axis in layout.batch if axis in free
    )
    chunks = 1 if layout.length is None else 2 * mesh.shape[layout.length]
    strips = -(-request.length // (chunks * stream.sizes.queries))
    if 16 * strips * (1 if segments is None else examples) > SPAN_BYTES:
        return f"the scalar memory does not hold what {examples} × {strips} blocks of queries see"
    reason = tile_attention.why_untraced(execution, stream)
    return reason and f"{reason} on {placement.current_device()}"


def sizes_of(
    encoding: Encoding, carry: Carry, length: int, keys: int, blocks: Sequence[int] | None = None
) -> BlockSizes:
    """Returns the sizes of blocks; by default those of the chip: small for a carry or a heavy
    score, else large.
    """
    small = encoding.traits.heavy_score or jax.tree.leaves(carry)
    chosen = blocks or _chip()["small" if small else "large"]
    queries, near, far = chosen
    near = min(near, -(-keys // LANES) * LANES) if near % LANES == 0 else near
    return BlockSizes(min(queries, -(-length // SUBLANES) * SUBLANES), near, max(near, far))


def _chip() -> dict[str, Any]:
    """The entry of `CHIPS` of the current device; where kernels are only interpreted, that of a
    v5e.
    """
    return CHIPS.get(placement.current_device(), CHIPS["TPU v5 lite"])


def parts_of(
    keys: int, sizes: BlockSizes, k: Array, v: Array, resident: int | None = None
) -> tuple[int, int]:
    """In how many parts the keys are read into fast memory, and how many keys a part has: whole
    blocks.

    The chip's own number is for keys of up to 256 bytes; fewer longer ones fit.
    """
    if resident is None:
        size = max(-(-x.shape[-1] // LANES) * LANES * x.dtype.itemsize for x in (k, v))
        resident = max(_chip()["resident"] * 256 // max(size, 256), sizes.near)
    parts = -(-keys // resident)
    return parts, -(-keys // (parts * sizes.near)) * sizes.near


def _prepare(
    encoding: Encoding, request: Request, resident: int | None, interpret: bool
) -> tuple[Callable[[], Stream], TpuExecution]:
    """Returns the function that gives the stream, with whole blocks of queries and whole parts of
    keys, and how the kernels run.
    """
    keys = len(request.keys.indices)
    carry = carry_of(encoding, request)
    sizes = sizes_of(encoding, carry, request.length, keys, request.blocks)
    parts, resident = parts_of(keys, sizes, request.keys.k, request.keys.v, resident)
    make_stream = functools.partial(
        tile_attention.whole_blocks, encoding, request, sizes, parts * resident
    )
    return make_stream, execution_of(resident, request.layout.width, interpret)


def execution_of(keys: int, head_axis: str | None, interpret: bool) -> TpuExecution:
    """Returns how the kernels run on the current device, with `keys` keys in fast memory at a time."""
    return TpuExecution(keys, _chip()["gathers"], head_axis, interpret)
