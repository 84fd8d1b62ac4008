"""Logits over the slots of a cache, from the nearest keys to the farthest, until farther ones no longer matter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.attention.inputs import Inputs
from cope_jax.encodings import Encoding
from cope_jax.ops.logits import content_logits
from cope_jax.typing import Array, PyTree

# Slots that are scored together: enough for CoPE with the paper's table of 64 to settle where gates are about ½.
BLOCK = 256


def logits_over_slots(encoding: Encoding, inputs: Inputs, filled: Array) -> Array:
    """The logits over all slots, logits_BHLC.

    For an encoding that settles all slots are first scored as if all rows had; then block after block, from the nearest
    on, is scored over until they have. So CoPE sums the gates of a few hundred keys, and not of all C.
    """
    carry, capacity = encoding.initial_carry(inputs.q), inputs.rotated_k.shape[1]
    content_BHLC, mask_B1LC = content_logits(inputs.rotated_q, inputs.rotated_k), inputs.mask.dense()
    size = min(BLOCK, capacity)

    def on(hook: Callable[..., Any], carry: PyTree, fresh: Array | None = None, start: Array | None = None) -> Any:
        def cut(x: Array, axis: int) -> Array:
            return x if start is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        mask_B1LM = cut(mask_B1LC, 3)
        features = jax.tree.map(lambda feature: cut(feature, 1), inputs.features)
        k, content, positions = cut(inputs.rotated_k, 1), cut(content_BHLC, 3), cut(inputs.k_positions, 1)
        mask_B1LM = mask_B1LM if fresh is None else mask_B1LM & fresh
        return hook(inputs.q, k, features, content, mask_B1LM, inputs.q_positions, positions, carry)

    if encoding.settled(carry) is None:
        return on(encoding.score, carry)[0]

    def unsettled(loop: tuple[Array, Array, PyTree]) -> Array:
        end, _, carry = loop
        return (end > 0) & ~jnp.all(jnp.asarray(encoding.settled(carry)))

    def score(loop: tuple[Array, Array, PyTree]) -> tuple[Array, Array, PyTree]:
        end, logits_BHLC, carry = loop
        start = jnp.maximum(end - size, 0)
        fresh_111M = (start + jnp.arange(size, dtype=jnp.int32) < end)[None, None, None]
        scored_BHLM, carry = on(encoding.score, carry, fresh_111M, start)
        old_BHLM = jax.lax.dynamic_slice_in_dim(logits_BHLC, start, size, axis=3)
        scored_BHLM = jnp.where(fresh_111M, scored_BHLM, old_BHLM)
        return start, jax.lax.dynamic_update_slice_in_dim(logits_BHLC, scored_BHLM, start, axis=3), carry

    last = jnp.minimum(filled, capacity)
    return jax.lax.while_loop(unsettled, score, (last, on(encoding.settled_score, carry), carry))[1]
