"""The output layer of language models over words, with its loss."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.layout import WHOLE, Layout
from cope_jax.ops.losses import cross_entropy, is_wrong, sampled_cross_entropy


class WordSoftmax(nnx.Module):
    """An output layer with the logits W h + b over the vocabulary.

    W, `[V, D]`, may be tied, which means that W is the table of an embedding.

    >>> softmax = WordSoftmax(vocab_size=5, width=2, rngs=nnx.Rngs(0))
    >>> softmax(jnp.zeros((1, 3, 2))).shape
    (1, 3, 5)
    """

    def __init__(self, vocab_size: int, width: int, *, tied: bool = False, rngs: nnx.Rngs):
        initial = jax.nn.initializers.normal(width**-0.5)
        table = (
            None
            if tied
            else nnx.Param(initial(rngs.params(), (vocab_size, width)), axes=("vocab", "embed"))
        )
        self.table_VD = table
        self.bias_V = nnx.Param(jnp.zeros(vocab_size), axes=("vocab",))

    def __call__(self, x_BLD: Array, tied_VD: Array | None = None, layout: Layout = WHOLE) -> Array:
        """Computes logits_BLV; `tied_VD` is W if W belongs to another layer."""
        logits_BLV = (
            jnp.einsum("BLD,VD->BLV", x_BLD, self._table(tied_VD)) + self.bias_V[...][None, None]
        )
        return layout.constrain(logits_BLV, "batch", "length", "width")

    def losses(
        self,
        x_BLD: Array,
        targets_BL: Array,
        weights_BL: Array,
        *,
        tied_VD: Array | None = None,
        sample_key: Array | None = None,
        num_sampled: int = 0,
        layout: Layout = WHOLE,
    ) -> dict[str, Array]:
        """Weighted sums over the tokens: `loss` and, if all classes are computed, `token_error`.

        With `sample_key`, the loss uses a sample of `num_sampled` classes. Without a key, or if
        `num_sampled` is 0, all classes are computed. `tied_VD` is W if W belongs to another layer.
        """
        if sample_key is not None and num_sampled:
            table_VD, bias_V = self._table(tied_VD), self.bias_V[...]
            loss_BL = sampled_cross_entropy(
                x_BLD, table_VD, bias_V, targets_BL, sample_key, num_sampled
            )
            return {"loss": jnp.sum(weights_BL * loss_BL)}
        logits_BLV = self(x_BLD, tied_VD, layout)
        wrong_BL = is_wrong(logits_BLV, targets_BL)
        return {
            "loss": jnp.sum(weights_BL * cross_entropy(logits_BLV, targets_BL)),
            "token_error": jnp.sum(weights_BL * wrong_BL.astype(weights_BL.dtype)),
        }

    def _table(self, tied_VD: Array | None) -> Array:
        if tied_VD is not None:
            return tied_VD
        if self.table_VD is None:
            raise ValueError("a tied softmax needs the embedding table: pass tied_VD")
        return self.table_VD[...]
