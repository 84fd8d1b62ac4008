"""The contract of a position encoding: hooks with identity defaults; and the registry of all encodings.

Attention always calls every hook, in this order, and never refers to an encoding by name:

1. `embed`          once, on the token embeddings, at the bottom of the model.
2. `features`       in each layer, once for each token, on the layer's input, queries, keys and values.
3. `rotate`         in each attention call; a cache holds the rotated keys.
4. `initial_carry`  in each attention call.
5. `score`          once for each block of keys, **from the block nearest to the query to the farthest**.
6. `sink`           once, after the last block.

What an encoding accumulates over pairs goes into the carry; what it computes for each token goes into the features.

An encoding that keeps these laws runs in every implementation of attention:

- **Blocks.** Any split of the keys into blocks, visited from the nearest to the farthest with the carry passed on,
  gives the values and gradients of one block. An encoding that cannot keep this law sets `splits_keys = False`.
- **Rows.** Any split of the queries gives the result of all queries together: a row of logits and of the carry depends
  only on its own query. An encoding that cannot keep this law sets `splits_queries = False`.
- **Decoding.** Token by token, with the features and their `state` kept, gives the result of the complete sequence.
- **Devices.** Any split of the sequence over devices gives the same result.
- **Maps.** `maps` returns the values that `score` used.

`score`, `tail`, `saturated`, `done`, `sink` and `initial_carry` apply to data only `cope_jax.ops`, arithmetic, products
and static slices, never gathers, flips, cumulative sums or barriers: a kernel that traces these hooks replaces the ops.
"""

import copy
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, check_at_least


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
    """One block of queries and keys: everything that its logits may depend on.

    Attributes:
      q: q_BHLK before rotation, so that added terms depend on a query's position through `q_positions` only.
      k: k_BGMK as a cache holds them, after rotation.
      v: v_BGMK.
      q_features: `Encoding.features` of the queries' tokens, each leaf `[B, heads, L, ...]` with H, G or 1 heads.
      k_features: the same of the keys' tokens, `[B, heads, M, ...]`.
      logits: logits_BHLM, q·k/√K after rotation, in the accumulator type, not yet masked.
      mask: mask_B1LM, True where query and key may meet. A gate of a masked pair is exactly 0.
      q_positions: int32 `[B, L]`, or 1 for B.
      k_positions: int32 `[B, M]`.
    """

    q: Array
    k: Array
    v: Array
    q_features: PyTree
    k_features: PyTree
    logits: Array
    mask: Array
    q_positions: Array
    k_positions: Array

    @property
    def distance(self) -> Array:
        """How far each key is before its query, i − j, distance_B1LM."""
        return (self.q_positions[:, :, None] - self.k_positions[:, None, :])[:, None]


class Carry(NamedTuple):
    """What `score` accumulated over the keys nearer to the query than its block, by kind.

    Attributes:
      sums: a tree of `[B, H, L]`: running sums, to which `score` adds terms that do not depend on them. Streaming
        attention computes all their gradients in one pass.
      constants: a tree of `[B, H, L, ...]` that `score` passes on unchanged.
      state: a tree of `[B, H, L, ...]` of anything else. Streaming attention then takes all keys as one block.
    """

    sums: PyTree = ()
    constants: PyTree = ()
    state: PyTree = ()


class Encoding(nnx.Module):
    """Base class: an encoding overrides the hooks it needs, and leaves the rest as the identity.

    A subclass declares its options in a frozen dataclass, `Config`; its constructor accepts `(config, shape, *, rngs)`.

    Whatever the compute type, positions, gates and their sums are float32 (float64 under float64 inputs); logits arrive
    in that type too. Positions are int32 arrays of shape `[B, L]` or `[1, L]`: consecutive, offset, randomised or
    restarting in each segment, never an implied `arange`.

    Attributes:
      embeds_input: it adds to the token embeddings (`embed`), so that one instance serves all layers.
      splits_keys: the law of blocks holds. If not, attention takes all keys as one block; a ring raises ConfigError.
      splits_queries: the law of rows holds. If not, only full attention works; all else raises ConfigError.
      sink_value: the value that the sink has: 0, or the value of the query's own token.
    """

    Config: ClassVar[type] = NoOptions
    embeds_input: bool = False
    splits_keys: bool = True
    splits_queries: bool = True
    sink_value: Literal["zero", "own"] = "zero"

    def __init__(self, config: Any, shape: AttentionShape, *, rngs: nnx.Rngs):
        del rngs
        self.config = config
        self.shape = shape

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        """Adds position to the token embeddings. Returns x_BLD."""
        del positions_BL
        return x_BLD

    def features(
        self, x_BMD: Array | None, q_BMHK: Array, k_BMGK: Array, v_BMGK: Array, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Computes from each token what `rotate`, `initial_carry` and `score` need of it, as a query and as a key.

        Args:
          x_BMD: the input of the attention layer; None if the caller has none.
          q_BMHK: queries before rotation.
          k_BMGK: keys before rotation.
          v_BMGK: values.
          state: what the call for the previous tokens returned; None at the start of a sequence, which must mean the
            same as zeros.

        Returns:
          (features, state). Features are a tree of `[B, M, heads, ...]` with H, G or 1 heads, cached when decoding.
          State is what the features of later tokens need from these tokens, a tree of `[B, ...]`: a running sum, or the
          last inputs of a convolution. This hook does not see the segments packed into a row: sums are correct if only
          their differences within a segment matter; a window of tokens would reach into the previous segment.
        """
        del x_BMD, q_BMHK, k_BMGK, v_BMGK, state
        return (), ()

    def rotate(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        q_features: PyTree,
        k_features: PyTree,
        q_positions_BL: Array,
        k_positions_BM: Array,
    ) -> tuple[Array, Array]:
        """Transforms queries and keys before their product. Features are as `features` gives them.

        Returns:
          (q_BLHK, k_BMGK).
        """
        del q_features, k_features, q_positions_BL, k_positions_BM
        return q_BLHK, k_BMGK

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        """The carry before the first block, from q and q_features as in `Pairs`."""
        del q_BHLK, q_features
        return Carry()

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        """Turns the content logits of one block of keys into the logits of attention.

        Returns:
          (logits_BHLM, carry). Values at masked pairs are ignored, but their gradients must be finite.
        """
        return pairs.logits, carry

    def saturated(self, carry: Carry) -> Array | None:
        """True for the rows whose logits no longer depend on what the carry accumulates: saturated_BHL.

        Once all rows of a block are saturated, `tail` gives the logits of all farther keys. None: this encoding never
        saturates.
        """
        del carry
        return None

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        """logits_BHLM as `score` gives them, for a block whose rows are all saturated. The carry does not change."""
        return self.score(pairs, carry)[0]

    def done(self, carry: Carry) -> Array | None:
        """True for the rows in which all farther keys have no weight, done_BHL.

        Once all rows are done, farther blocks are skipped. None: keys have weight at any distance.
        """
        del carry
        return None

    def sink(self, carry: Carry) -> Array | None:
        """One more logit after the last block, logit_BHL; None if the encoding has no sink.

        Its value is `sink_value`. It takes weight from the keys, whose weights then sum to less than 1.
        """
        del carry
        return None

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Named `[B, H, L, M]` maps for inspection, over all keys at once, such as CoPE's gates. Default: none."""
        del pairs
        return {}

    def of_head(self, head: int) -> Self:
        """The encoding of one query head and its key head: attention of that head alone with it gives the same result.

        An encoding with parameters or constants for each head slices them with `_one_head`; one that mixes heads raises
        ConfigError.
        """
        del head
        return self._one_head()

    def _one_head(self, **attributes: Any) -> Self:
        """A copy for one head, with some attributes replaced, such as by the parameters of that head."""
        one = copy.copy(self)
        one.shape = dataclasses.replace(self.shape, num_heads=1, num_kv_heads=1, model_dim=self.shape.width)
        for name, value in attributes.items():
            setattr(one, name, value)
        return one


ENCODINGS: Registry[type[Encoding]] = Registry("encoding")
