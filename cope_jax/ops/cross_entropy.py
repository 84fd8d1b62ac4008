"""The loss of next-token prediction."""

import jax
import jax.numpy as jnp

from cope_jax.typing import Array


def cross_entropy(logits_BLV: Array, targets_BL: Array) -> Array:
    """−log softmax(logits)[target] of each token, in nats, shape `[B, L]`.

    >>> cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32)).round(4).tolist()
    [[1.3863]]
    """
    target_BL1 = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
    return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL1[..., 0]
