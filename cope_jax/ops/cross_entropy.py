"""The loss of next-token prediction."""

import jax
import jax.numpy as jnp

from cope_jax.typing import Array


def cross_entropy(logits_BLV: Array, targets_BL: Array) -> Array:
    """−log softmax(logits)[target] of each token, in nats, shape `[B, L]`.

    >>> round(float(cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32))[0, 0]), 4)
    1.3863
    """
    # A target outside of the vocabulary gives NaN; a negative one would count from the end.
    known_BL = jnp.where(targets_BL < 0, logits_BLV.shape[-1], targets_BL)
    target_BL1 = jnp.take_along_axis(logits_BLV, known_BL[..., None], axis=-1)
    return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL1[..., 0]
