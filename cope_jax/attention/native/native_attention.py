"""Attention on CPUs by the C++ library of this package, for encodings whose `native_score` says what they add."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array
from cope_jax.attention.blockwise import RESIDUALS
from cope_jax.attention.inputs import Inputs, head_major
from cope_jax.attention.native import library
from cope_jax.encodings import Encoding
from cope_jax.encodings.native_score import NativeScore, native_score_of

WIDTH = 16  # widths of heads are multiples of this
TYPES = (jnp.float32, jnp.bfloat16)


class _Options(NamedTuple):
    """The attributes of the custom calls; the numbers are those of the enums in strip.h."""

    causal: bool
    window: int
    gate: int
    position: int


class _Arrays(NamedTuple):
    """The differentiable arguments; those that a score does not have are empty. Types are those of the caller."""

    q: Array  # q_BLHK, rotated
    k: Array  # k_BMGK, rotated
    v: Array  # v_BMGK
    x: Array  # x_BLHK, the queries of gates and of the table: not rotated
    u: Array  # u_BMGK, gate keys
    table: Array  # e_NK
    slopes: Array  # m_H


def why_not(encoding: Encoding, inputs: Inputs) -> str | None:
    """Returns why `native_attention` cannot run; None if it can."""
    score = _score(encoding, inputs)
    if score is None:
        return "the C++ library does not know what this encoding adds to the logits"
    for array in (inputs.rotated_q, inputs.rotated_k, inputs.v):
        if array.dtype not in TYPES:
            return f"a type is {array.dtype}, not float32 or bfloat16"
        if array.shape[-1] % WIDTH:
            return f"the width of a head, {array.shape[-1]}, is not a multiple of {WIDTH}"
    if score.gate_keys is not None and score.gate_keys.shape != inputs.rotated_k.shape:
        return "gate keys and keys have different shapes"
    if 0 in (*inputs.q.shape, *inputs.v.shape):
        return "there are no queries or no keys"
    ids = inputs.mask.q_segment_ids_BL, inputs.mask.k_segment_ids_BM
    if any(x is not None and x.dtype != jnp.int32 for x in ids):
        return "segment ids must be int32"
    if inputs.mask.given_B1LM is not None:
        return "a mask is given, and the C++ library knows only causality, windows and segments"
    if inputs.drop is not None:
        return "the C++ library has no dropout"
    if not _in_order(inputs):
        return "the queries are not the last of the keys, in their order"
    return library.why_not()


def native_attention(encoding: Encoding, inputs: Inputs) -> Array:
    """Computes the result of `blockwise_attention` in C++, with XLA's threads. Call it only if `why_not` is None.

    Memory is linear in the length. Sums are float32 whatever the type of the inputs.

    Returns:
      out_BLHK, in the type of the values.
    """
    score = _score(encoding, inputs)
    assert score is not None
    window = 0 if inputs.mask.window is None else inputs.mask.window
    position = 1 if score.slopes is not None else 0
    options = _Options(inputs.mask.causal, window, (None, "logits", "keys").index(score.gates), position)
    empty = jnp.zeros((0,), jnp.float32)
    counts = score.gates is not None
    arrays = _Arrays(
        q=head_major(inputs.rotated_q),
        k=head_major(inputs.rotated_k),
        v=head_major(inputs.v),
        x=head_major(inputs.q) if counts else empty,
        u=empty if score.gate_keys is None else head_major(score.gate_keys),
        table=jnp.zeros((0, 0), jnp.float32) if score.table is None else score.table,
        slopes=empty if score.slopes is None else score.slopes,
    )
    return _attend(options, arrays, _segments(inputs))


def _score(encoding: Encoding, inputs: Inputs) -> NativeScore | None:
    return native_score_of(encoding, inputs.v, inputs.k_features)


def _in_order(inputs: Inputs) -> bool:
    queries, keys = inputs.mask.q_indices_L, inputs.mask.k_indices_M
    if not isinstance(queries, np.ndarray) or not isinstance(keys, np.ndarray):
        return False
    length = len(keys)
    return np.array_equal(keys, np.arange(length)) and np.array_equal(queries, np.arange(length - len(queries), length))


def _segments(inputs: Inputs) -> tuple[Array, Array]:
    def of_examples(ids: Array | None) -> Array:
        if ids is None:
            return jnp.zeros((0,), jnp.int32)
        return jnp.broadcast_to(ids, (len(inputs.q), ids.shape[1]))

    return of_examples(inputs.mask.q_segment_ids_BL), of_examples(inputs.mask.k_segment_ids_BM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, arrays: _Arrays, segments: tuple[Array, Array]) -> Array:
    return _forward(options, arrays, segments)[0]


def _forward(options: _Options, arrays: _Arrays, segments: tuple[Array, Array]) -> tuple[Array, Any]:
    batch, length, heads, _ = arrays.q.shape
    shapes = (batch, length, heads, arrays.v.shape[-1]), (batch, heads, length)
    out, logsumexp = _call("Forward", options, shapes, *_floats(arrays), *segments)
    out, logsumexp = checkpoint_name((out.astype(arrays.v.dtype), logsumexp), RESIDUALS)
    return out, (arrays, segments, out, logsumexp)


def _backward(options: _Options, kept: Any, dout_BLHK: Array) -> tuple[Any, Any]:
    arrays, segments, out, logsumexp = kept
    shapes = [array.shape for array in arrays]
    found = _call("Backward", options, shapes, *_floats(arrays), *segments, *_floats((out, logsumexp, dout_BLHK)))
    gradients = (gradient.astype(array.dtype) for gradient, array in zip(found, arrays, strict=True))
    return _Arrays(*gradients), None


_attend.defvjp(_forward, _backward)


def _floats(arrays: Any) -> list[Array]:
    return [array.astype(jnp.float32) for array in arrays]


def _call(name: str, options: _Options, shapes: Any, *arrays: Array) -> Any:
    """Calls C++; with `jax.vmap`, once for each entry."""
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call(library.target(name), results, vmap_method="sequential")
    attributes = {
        "causal": options.causal,
        "window": np.int64(options.window),
        "gate": np.int64(options.gate),
        "position": np.int64(options.position),
    }
    return call(*arrays, **attributes)
