"""Attention on CPUs by the C++ library of this package, for encodings whose `native_score` says
what they add.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array
from cope_jax.attention import derivative
from cope_jax.attention.blockwise import blockwise_attention
from cope_jax.attention.derivative import RESIDUALS
from cope_jax.attention.kernels import arguments
from cope_jax.attention.kernels.arguments import GATES, Arrays
from cope_jax.attention.kernels.cpu import library
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.encodings import Encoding
from cope_jax.encodings.native_score import NativeScore

NAME = "the functions in C++"
WIDTH = 16  # widths of heads are multiples of this


class _Options(NamedTuple):
    """The attributes of the custom calls; the numbers are those of the enums in strip.h."""

    causal: bool
    window: int
    gate: int
    position: int


def plan(encoding: Encoding, request: Request) -> Plan | Reason:
    """Returns the plan to compute the result of `blockwise_attention` in C++, or the reason why
    this is not possible.

    It runs with XLA's threads. Memory is linear in the length. Sums are float32 whatever the type
    of the inputs.
    """
    widths = request.queries.rotated_q.shape[-1], request.keys.v.shape[-1]
    if why := arguments.why_not(NAME, request):
        return Reason(why)
    if any(width % WIDTH for width in widths):
        return Reason(f"the widths of a head, {widths}, are not multiples of {WIDTH}")
    score = arguments.score_of(NAME, encoding, request)
    if isinstance(score, str):
        return Reason(score)
    if why := library.why_not():
        return Reason(why)
    return Plan("fused", lambda: _run(encoding, score, request))


def attention(score: NativeScore, request: Request) -> Array:
    """Computes out_BLHK in C++, in the type of the values."""
    given = arguments.arrays_of(score, request), arguments.segments_of(request)
    return _attend(_options_of(score, request), *given)


def _run(encoding: Encoding, score: NativeScore, request: Request) -> Array:
    """Computes the same, in forward mode by `blockwise`."""
    graph, params = nnx.split(encoding)
    options = _options_of(score, request)
    of_kernel = arguments.arrays_of(score, request), arguments.segments_of(request)

    def kernel(given: Any) -> Array:
        return _attend(options, *given[0])

    def xla(given: Any) -> Array:
        return blockwise_attention(nnx.merge(graph, given[1]), given[2])

    return derivative.attend_by_kernel(kernel, xla, (of_kernel, params, request))


def _options_of(score: NativeScore, request: Request) -> _Options:
    position = 1 if score.slopes is not None else 0
    window, gates = arguments.window_of(request), GATES.index(score.gates)
    return _Options(request.causal, window, gates, position)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, arrays: Arrays, segments: tuple[Array, Array]) -> Array:
    return _forward(options, arrays, segments)[0]


def _forward(options: _Options, arrays: Arrays, segments: tuple[Array, Array]) -> tuple[Array, Any]:
    batch, length, heads, _ = arrays.q.shape
    shapes = (batch, length, heads, arrays.v.shape[-1]), (batch, heads, length)
    out, logsumexp = _call("Forward", options, shapes, *_floats(arrays), *segments)
    out, logsumexp = checkpoint_name((out.astype(arrays.v.dtype), logsumexp), RESIDUALS)
    return out, (arrays, segments, out, logsumexp)


def _backward(options: _Options, kept: Any, dout_BLHK: Array) -> tuple[Any, Any]:
    arrays, segments, out, logsumexp = kept
    shapes = [array.shape for array in arrays]
    wide = _call(
        "Backward",
        options,
        shapes,
        *_floats(arrays),
        *segments,
        *_floats((out, logsumexp, dout_BLHK)),
    )
    gradients = (gradient.astype(array.dtype) for gradient, array in zip(wide, arrays, strict=True))
    return Arrays(*gradients), None


_attend.defvjp(_forward, _backward)


def _floats(arrays: Any) -> list[Array]:
    return [array.astype(jnp.float32) for array in arrays]


def _call(name: str, options: _Options, shapes: Any, *arrays: Array) -> Any:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    attributes = {
        "causal": options.causal,
        "window": np.int64(options.window),
        "gate": np.int64(options.gate),
        "position": np.int64(options.position),
    }
    return library.call(name, results, *arrays, **attributes)
