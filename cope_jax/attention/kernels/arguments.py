"""The arguments of kernels that are written by hand, for CPUs and for GPUs, and what these kernels cannot run."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array
from cope_jax.attention.inputs import Inputs, head_major
from cope_jax.encodings import Encoding
from cope_jax.encodings.native_score import NativeScore

GATES = (None, "logits", "keys")  # the kernels use the places in this tuple
TYPES = (jnp.float32, jnp.bfloat16)


class Arrays(NamedTuple):
    """The differentiable arguments, in the types of the caller; those that a score does not have are empty."""

    q: Array  # q_BLHK, rotated
    k: Array  # k_BMGK, rotated
    v: Array  # v_BMGK
    x: Array  # x_BLHK, the queries of gates and of the table: not rotated
    u: Array  # u_BMGK, gate keys
    table: Array  # e_NK
    slopes: Array  # m_H


def score_of(encoding: Encoding, inputs: Inputs) -> NativeScore | None:
    """What the encoding adds to the logits; None if the kernels do not know it."""
    return encoding.native_score(inputs.v, inputs.k_features)


def why_not(kernels: str, encoding: Encoding, inputs: Inputs) -> str | None:
    """Returns why no kernel that is written by hand can run; None if there is no reason. `kernels` is their name."""
    score = score_of(encoding, inputs)
    if score is None:
        return f"{kernels} cannot express what this encoding adds to the logits"
    for array in (inputs.rotated_q, inputs.rotated_k, inputs.v):
        if array.dtype not in TYPES:
            return f"a type is {array.dtype}, not float32 or bfloat16"
    if score.gate_keys is not None and score.gate_keys.shape != inputs.rotated_k.shape:
        return "gate keys and keys have different shapes"
    if score.gates is not None and inputs.q.shape != inputs.rotated_q.shape:
        return "rotation changes the width of the queries, of which gates are taken"
    if 0 in (*inputs.q.shape, *inputs.v.shape):
        return "there are no queries or no keys"
    if inputs.mask.given_B1LM is not None:
        return f"a mask is given, and {kernels} know only causality, windows and segments"
    if inputs.drop is not None:
        return f"{kernels} have no dropout"
    if not _in_order(inputs):
        return "the queries are not the last of the keys, in their order"
    return None


def _in_order(inputs: Inputs) -> bool:
    queries, keys = inputs.mask.q_indices_L, inputs.mask.k_indices_M
    if not isinstance(queries, np.ndarray) or not isinstance(keys, np.ndarray):
        return False
    length = len(keys)
    return np.array_equal(keys, np.arange(length)) and np.array_equal(queries, np.arange(length - len(queries), length))


def arrays_of(score: NativeScore, inputs: Inputs) -> Arrays:
    """The differentiable arguments."""
    empty = jnp.zeros((0,), jnp.float32)
    return Arrays(
        q=head_major(inputs.rotated_q),
        k=head_major(inputs.rotated_k),
        v=head_major(inputs.v),
        x=empty if score.gates is None else head_major(inputs.q),
        u=empty if score.gate_keys is None else head_major(score.gate_keys),
        table=jnp.zeros((0, 0), jnp.float32) if score.table is None else score.table,
        slopes=empty if score.slopes is None else score.slopes,
    )


def window_of(inputs: Inputs) -> int:
    """The window; 0 if it hides no key."""
    window, most = inputs.mask.window, max(inputs.q.shape[2], inputs.v.shape[2])
    return 0 if window is None or window >= most else window


def segments_of(inputs: Inputs) -> tuple[Array, Array]:
    """The segment ids of queries and keys, `[B, L]` and `[B, M]`; empty if there is one segment."""

    def of_examples(ids: Array | None) -> Array:
        if ids is None:
            return jnp.zeros((0,), jnp.int32)
        return jnp.broadcast_to(ids, (len(inputs.q), ids.shape[1]))

    return of_examples(inputs.mask.q_segment_ids_BL), of_examples(inputs.mask.k_segment_ids_BM)
