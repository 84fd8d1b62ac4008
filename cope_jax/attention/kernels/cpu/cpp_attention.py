"""Attention on CPUs by kernels in C++ that are generated from an encoding's own hooks."""

from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention.blocks import BlockSizes, head_major
from cope_jax.attention.kernels.cpu import library
from cope_jax.attention.kernels.cpu.cpp_kernel import CpuExecution
from cope_jax.attention.kernels.tile import tile_attention
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.attention.stream import Stream
from cope_jax.encodings import Encoding

SIZES, SHORT_SIZES, SHORTEST_SIZES = (BlockSizes(size, size, size) for size in (64, 32, 16))
SHORT = 256  # up to this length, small blocks have fewer hidden pairs
TYPES = (jnp.float32, jnp.bfloat16, jnp.float64)


def plan(encoding: Encoding, request: Request) -> Plan | Reason:
    """Returns the plan to compute the result of `blockwise_attention` with generated kernels, or the
    reason why this is not possible.

    The kernels are compiled while the plan is made. Sums are float32 (float64 for float64 inputs).

    Raises:
      ConfigError: `COPE_JAX_NATIVE` is required, and a kernel cannot be compiled.
    """
    if why := _refusal(encoding, request) or library.why_not():
        return Reason(why)
    stream = jax.eval_shape(lambda: _prepare(encoding, request))
    if why := tile_attention.why_untraced(_execution(), stream):
        if library.UNCOMPILED in why:
            library.check_required(why)
        return Reason(why)
    return Plan("fused", lambda: run(encoding, request))


def run(encoding: Encoding, request: Request) -> Array:
    """Computes out_BLHK, in the type of the values."""
    stream = _prepare(encoding, request)
    out = tile_attention.attend(_execution(), stream)
    return head_major(out[:, :, : request.length]).astype(request.keys.v.dtype)


def _refusal(encoding: Encoding, request: Request) -> str | None:
    queries, keys = request.queries, request.keys
    types = [x.dtype for x in (queries.q, keys.k, keys.v)]
    if others := [dtype for dtype in types if dtype not in TYPES]:
        return f"a type is {others[0]}, not float32, bfloat16 or float64"
    if len({dtype == jnp.float64 for dtype in types}) > 1:
        return "only some of q, k and v are float64"
    return tile_attention.why_not(encoding, request)


def _execution() -> CpuExecution:
    return CpuExecution(library.has_tiles())


def _prepare(encoding: Encoding, request: Request) -> Stream:
    """Returns the stream with whole blocks of queries and of keys; in float32, if the CPU has no
    matrix unit for bfloat16.
    """

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    request = request if library.has_tiles() else jax.tree.map(wide, request)
    return tile_attention.whole_blocks(encoding, request, _sizes(request.length))


def _sizes(length: int) -> BlockSizes:
    if length > SHORT:
        return SIZES
    # The fewer rows without a query.
    return min((SHORT_SIZES, SHORTEST_SIZES), key=lambda sizes: -length % sizes.queries)
