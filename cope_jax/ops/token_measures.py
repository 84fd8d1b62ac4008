"""Loss and errors of predicted tokens."""

import jax
import jax.numpy as jnp

from cope_jax.ops.cross_entropy import cross_entropy
from cope_jax.typing import Array


def token_measures(logits_BLV: Array, targets_BL: Array, weights_BL: Array) -> dict[str, tuple[Array, Array]]:
    """`loss`, `token_error` and `sequence_error` of a batch, each as a sum and a weight; their quotient is the mean.

    The loss, in nats, and the share of tokens that the most probable one misses are means over tokens, each times its
    weight; the share of sequences with any such miss is one over the sequences that have a token of weight above 0.

    >>> measures = token_measures(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), jnp.ones((1, 2)))
    >>> {name: float(total / weight) for name, (total, weight) in measures.items()}
    {'loss': 1.38..., 'token_error': 0.5, 'sequence_error': 1.0}
    """
    best_BL = jax.lax.argmax(logits_BLV, 2, targets_BL.dtype)
    wrong_BL = weights_BL * (best_BL != targets_BL).astype(weights_BL.dtype)
    tokens = jnp.sum(weights_BL)
    return {
        "loss": (jnp.sum(weights_BL * cross_entropy(logits_BLV, targets_BL)), tokens),
        "token_error": (jnp.sum(wrong_BL), tokens),
        "sequence_error": (
            jnp.sum(jnp.any(wrong_BL > 0, axis=1).astype(jnp.float32)),
            jnp.sum(jnp.any(weights_BL > 0, axis=1).astype(jnp.float32)),
        ),
    }
