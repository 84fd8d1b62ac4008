"""The contract of a position encoding: hooks with identity defaults; and the registry of all encodings.

Attention calls every hook, always, in this order, and knows no encoding by name:

1. `embed`          once, on the token embeddings, at the bottom of the model.
2. `key_features`   in each layer, on the layer's input, keys and values; cached when decoding.
3. `rotate`         in each attention call; a cache holds the rotated keys.
4. `initial_carry`  in each attention call.
5. `score`          once for each block of keys, **from the block nearest to the query to the farthest**.

**Block law.** For every encoding, any split of the keys into blocks, visited from the nearest to the farthest with the
carry handed on, gives what one single block gives, in value and in every gradient.

That is all an encoding has to know to run in every implementation of attention. Where it can say more of its carry,
streaming attention is faster: `settled` and `settled_score` end the work on rows whose carry no longer matters, and
`slopes` lets one pass over the keys make all gradients.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, check_at_least
from cope_jax.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The sizes that every encoding is built for.

    Attributes:
      num_heads: H, the number of query heads.
      head_dim: K, the width of one head.
      num_kv_heads: G, the number of key/value heads; None means H.
      model_dim: D, the width of the model; None means H·K.
      max_length: the longest sequence the model will see; None means no bound is known. Tables that grow with the
        length take their size from it.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    model_dim: int | None = None
    max_length: int | None = None

    def __post_init__(self):
        check_at_least(1, "attention", **dataclasses.asdict(self))
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.kv_heads}")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim if self.model_dim is None else self.model_dim


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The config of an encoding without options."""


class Encoding(nnx.Module):
    """Base class: an encoding overrides the hooks it needs, and leaves the rest as the identity.

    A subclass names its options in a frozen dataclass, `Config`, and takes `(config, shape, *, rngs)`.

    Whatever the compute type, positions, gates and their sums are float32 (float64 under float64 inputs); logits arrive
    in that type too. Positions are int32 arrays of shape `[B, L]` or `[1, L]`: consecutive, offset, randomised or
    restarting in each segment, never an implied `arange`.
    """

    Config: ClassVar[type] = NoOptions

    def __init__(self, config: Any, shape: AttentionShape, *, rngs: nnx.Rngs):
        del rngs
        self.config = config
        self.shape = shape

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        """Adds position to the token embeddings. Returns x_BLD."""
        del positions_BL
        return x_BLD

    def rotate(self, q_BLHK: Array, k_BMGK: Array, q_positions_BL: Array, k_positions_BM: Array) -> tuple[Array, Array]:
        """Transforms queries and keys before their product. Returns (q_BLHK, k_BMGK)."""
        del q_positions_BL, k_positions_BM
        return q_BLHK, k_BMGK

    def key_features(self, x_BMD: Array | None, k_BMGK: Array, v_BMGK: Array) -> PyTree:
        """What `score` needs of each key besides the key itself: a pytree of `[B, M, ...]`, cached when decoding.

        Keys and values are those before rotation. `x_BMD`, the input of the attention layer, is None where the caller
        has none.
        """
        del x_BMD, k_BMGK, v_BMGK
        return ()

    def initial_carry(self, q_BLHK: Array) -> PyTree:
        """What `score` has accumulated before the first block: a pytree of `[B, H, L, ...]`."""
        del q_BLHK
        return ()

    def score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> tuple[Array, PyTree]:
        """Turns the content logits of one block of keys into the logits of attention.

        Args:
          q_BLHK: queries before rotation, so that what is added depends on the place of a query through its positions
            only.
          k_BMGK: the keys of this block as a cache holds them, after rotation.
          features: `key_features` of this block.
          logits_BHLM: q·k/√K after rotation, in the accumulator type, not yet masked.
          mask_B1LM: True where query and key may meet. A gate of a masked pair is exactly 0.
          q_positions_BL: positions of the queries.
          k_positions_BM: positions of the keys of this block.
          carry: what was accumulated over the keys nearer to the query than this block.

        Returns:
          (logits_BHLM, carry). Values at masked pairs are ignored but must be finite in their gradient.
        """
        del q_BLHK, k_BMGK, features, mask_B1LM, q_positions_BL, k_positions_BM
        return logits_BHLM, carry

    def settled(self, carry: PyTree) -> Array | None:
        """True for the rows whose logits no longer depend on what the carry accumulates: settled_BHL.

        Once all rows of a block are settled, `settled_score` gives the logits of the keys that are farther still. None:
        this encoding never settles.
        """
        del carry
        return None

    def settled_score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> Array:
        """logits_BHLM as `score` has them, for a block whose rows are all settled. The carry stays as it is."""
        return self.score(q_BLHK, k_BMGK, features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, carry)[0]

    def slopes(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> PyTree | None:
        """∂logits/∂carry of one block, for a carry made of running sums and of constants.

        Returns:
          A tree like `carry`, with an array `[B, H, L, M]` for each leaf `[B, H, L]` that is a running sum (what
          `score` adds to it does not depend on it), and None for each leaf that `score` hands on as it is. Values
          at masked pairs are ignored but must be finite. Or None alone: the carry is of another kind, and streaming
          attention takes all keys of a strip as one block.
        """
        del q_BLHK, k_BMGK, features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM
        return None if jax.tree.leaves(carry) else carry

    def diagnostics(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
    ) -> dict[str, Array]:
        """Named `[B, H, L, M]` maps worth looking at, over all keys at once: CoPE's gates, say. Default: none."""
        del q_BLHK, k_BMGK, features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM
        return {}

    @classmethod
    def embeds_input(cls) -> bool:
        """Whether the encoding acts at the bottom of the model, so that one instance must serve all layers."""
        return cls.embed is not Encoding.embed


ENCODINGS: Registry[type[Encoding]] = Registry("encoding")
