"""Selective attention."""

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, Carry, Encoding, Pairs, Traits
from cope_jax.ops.sums import prefix_sum


@ENCODINGS.register("selective")
class Selective(Encoding):
    """Each token can mask earlier tokens for all later ones.

        a_ij = softmax_j(q_i·k_j/√K − F_ij),   F_ij = Σ_{l=j+1..i−1} S_lj,   S_lj = relu(q_l·k_j/√K of head 0),
        and S_lj = 0 if j = l or j is the first token.

    Leviathan et al. (arXiv 2410.02703). F is the same for all heads. It sums over queries, so the
    rows of the logits depend on the earlier queries: only full attention can run this encoding. In
    packed documents, the first token is the first that the query sees. It has no parameters, and is
    for causal attention.
    """

    traits = Traits(causal_only=True, splits_keys=False, splits_queries=False, splits_heads=False)

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        zero = jnp.zeros((), pairs.logits.dtype)
        seen_B1LM = jnp.broadcast_to(pairs.mask, (*pairs.logits[:, :1].shape,))
        # The first and the last key that a query sees are the first token and its own.
        first = prefix_sum(seen_B1LM.astype(zero.dtype)) == 1
        rows, keys = seen_B1LM.shape[2:]
        itself = (jnp.arange(keys)[None] == jnp.arange(keys - rows, keys)[:, None])[None, None]
        masking_B1LM = jnp.where(
            seen_B1LM & ~first & ~itself, jax.nn.relu(pairs.logits[:, :1]), zero
        )
        masked_B1ML = prefix_sum(jnp.swapaxes(masking_B1LM, 2, 3))
        masked_B1LM = jnp.swapaxes(masked_B1ML, 2, 3) - masking_B1LM
        return pairs.logits - masked_B1LM, carry
