"""The arguments of kernels that are written by hand, and what these kernels cannot run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array
from cope_jax.attention import placement
from cope_jax.attention.request import Request
from cope_jax.encodings import Encoding
from cope_jax.encodings.native_score import NativeScore

GATES = (None, "logits", "keys")  # the kernels use the places in this tuple
TYPES = (jnp.float32, jnp.bfloat16)
NEITHER = (None, None)


class Arrays(NamedTuple):
    """The differentiable arguments, in the types of the caller; those that a score does not have
    are empty.
    """

    q: Array  # q_BLHK, rotated
    k: Array  # k_BMGK, rotated
    v: Array  # v_BMGK
    x: Array  # x_BLHK, the queries of gates and of the table: not rotated
    u: Array  # u_BMGK, gate keys
    table: Array  # e_NK
    slopes: Array  # m_H


def why_not(kernels: str, request: Request) -> str | None:
    """Returns why kernels that are written by hand cannot run the request, whatever the encoding;
    None if they can.

    `kernels` is their name.
    """
    queries, keys, axis = request.queries, request.keys, request.layout.width
    types = [
        array.dtype for array in (queries.rotated_q, keys.k, keys.v) if array.dtype not in TYPES
    ]
    split = axis is not None and jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1
    reasons = {
        "sizes of blocks are given, and the kernels of this device have their own": request.blocks
        is not None,
        f"axis {axis!r} of the mesh splits the heads, and the kernels of this device cannot": split,
        f"a type is {(*types, None)[0]}, not float32 or bfloat16": bool(types),
        "there are no queries or no keys": 0 in (*queries.q.shape, *keys.v.shape),
        f"a mask is given, and {kernels} know only causality, windows and segments": keys.given
        is not None,
        f"a bias is given, and {kernels} have none": keys.bias is not None,
        f"scale or logits_soft_cap is given, and {kernels} have neither": (
            request.scale,
            request.soft_cap,
        )
        != NEITHER,
        f"{kernels} have no dropout": request.drop is not None,
        "the queries are not the last of the keys, in their order": not _in_order(request),
    }
    reason = next((why for why, is_so in reasons.items() if is_so), None)
    return reason or placement.why_undivided(request.layout.batch, None, 1)


def score_of(kernels: str, encoding: Encoding, request: Request) -> NativeScore | str:
    """Returns what the encoding adds to the logits, or why kernels that are written by hand cannot
    add it.
    """
    queries, keys = request.queries, request.keys
    score = encoding.native_score(keys.v, keys.features)
    if score is None:
        return f"{kernels} cannot express what this encoding adds to the logits"
    if score.gate_keys is not None and score.gate_keys.shape != keys.k.shape:
        return "gate keys and keys have different shapes"
    if score.gates is not None and queries.q.shape != queries.rotated_q.shape:
        return "rotation changes the width of the queries, of which gates are taken"
    return score


def _in_order(request: Request) -> bool:
    queries, keys = request.queries.indices, request.keys.indices
    if not isinstance(queries, np.ndarray) or not isinstance(keys, np.ndarray):
        return False
    length = len(keys)
    return np.array_equal(keys, np.arange(length)) and np.array_equal(
        queries, np.arange(length - len(queries), length)
    )


def arrays_of(score: NativeScore, request: Request) -> Arrays:
    """Returns the differentiable arguments."""
    empty = jnp.zeros((0,), jnp.float32)
    return Arrays(
        q=request.queries.rotated_q,
        k=request.keys.k,
        v=request.keys.v,
        x=empty if score.gates is None else request.queries.q,
        u=empty if score.gate_keys is None else score.gate_keys,
        table=jnp.zeros((0, 0), jnp.float32) if score.table is None else score.table,
        slopes=empty if score.slopes is None else score.slopes,
    )


def window_of(request: Request) -> int:
    """Returns the window; 0 if it hides no key."""
    window, most = request.window, max(request.length, len(request.keys.indices))
    return 0 if window is None or window >= most else window


def segments_of(request: Request) -> tuple[Array, Array]:
    """Returns the segment ids of queries and keys, `[B, L]` and `[B, M]`; empty if there is one
    segment.
    """

    def of_examples(ids: Array | None) -> Array:
        if ids is None:
            return jnp.zeros((0,), jnp.int32)
        return jnp.broadcast_to(ids, (len(request.queries.q), ids.shape[1]))

    return of_examples(request.queries.segment_ids), of_examples(request.keys.segment_ids)
