"""The contract of a position encoding: hooks with identity defaults; and the registry of all encodings.

Attention calls every hook, always, in this order, and knows no encoding by name:

1. `embed`          once, on the token embeddings, at the bottom of the model.
2. `features`       in each layer, once for each token, on the layer's input, queries, keys and values.
3. `rotate`         in each attention call; a cache holds the rotated keys.
4. `initial_carry`  in each attention call.
5. `score`          once for each block of keys, **from the block nearest to the query to the farthest**.
6. `sink`           once, after the last block.

What an encoding accumulates over pairs goes into the carry; what a token says of itself, into the features.

An encoding keeps these laws, and then runs in every implementation of attention:

- **Blocks.** Any split of the keys into blocks, visited from the nearest to the farthest with the carry handed on,
  gives what one block gives, in value and in every gradient. One that cannot keep it sets `splits_keys = False`.
- **Rows.** Any split of the queries gives what all together give: a row of logits and of the carry depends on its own
  query only. One that cannot keep it sets `splits_queries = False`.
- **Decoding.** Token by token, with the features and their `state` kept, gives what the whole sequence gives.
- **Devices.** Any split of the sequence over devices gives the same.
- **Maps.** `maps` are what `score` used.

In `score`, `tail`, `saturated`, `done`, `sink` and `initial_carry` data are touched by `cope_jax.ops`, arithmetic,
products and static slices only, never by gathers, flips, cumulative sums or barriers: a kernel that traces them
replaces the ops.
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
    """One block of queries and keys: all that may decide its logits.

    Attributes:
      q: q_BHLK before rotation, so that what is added depends on where a query is through its positions only.
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
      sums: a tree of `[B, H, L]`: running sums, to which `score` adds what does not depend on them. Streaming attention
        makes all their gradients in one pass.
      constants: a tree of `[B, H, L, ...]` that `score` hands on as it is.
      state: a tree of `[B, H, L, ...]` of anything else. Streaming attention takes all keys as one block then.
    """

    sums: PyTree = ()
    constants: PyTree = ()
    state: PyTree = ()


class Encoding(nnx.Module):
    """Base class: an encoding overrides the hooks it needs, and leaves the rest as the identity.

    A subclass names its options in a frozen dataclass, `Config`, and takes `(config, shape, *, rngs)`.

    Whatever the compute type, positions, gates and their sums are float32 (float64 under float64 inputs); logits arrive
    in that type too. Positions are int32 arrays of shape `[B, L]` or `[1, L]`: consecutive, offset, randomised or
    restarting in each segment, never an implied `arange`.

    Attributes:
      embeds_input: it adds to the token embeddings (`embed`), so that one instance serves all layers.
      splits_keys: the law of blocks holds. If not, attention takes all keys as one block, and a ring refuses.
      splits_queries: the law of rows holds. If not, attention takes all queries at once, and all else refuses.
      sink_value: what the logit of `sink` weighs: 0, or the value of the query's own token.
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
        """What each token says of itself to `rotate`, `initial_carry` and `score`, as a query and as a key.

        Args:
          x_BMD: the input of the attention layer; None where the caller has none.
          q_BMHK: queries before rotation.
          k_BMGK: keys before rotation.
          v_BMGK: values.
          state: what the call for the tokens before returned; None at the start of a sequence, which must mean the same
            as zeros.

        Returns:
          (features, state). Features are a tree of `[B, M, heads, ...]` with H, G or 1 heads, cached when decoding.
          State is what the features of later tokens need of these, a tree of `[B, ...]`: a running sum, the last inputs
          of a convolution. Segments packed into a row are not known here: sums are right where only their differences
          within a segment count; a window of tokens would reach into the segment before.
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
        """What `score` has accumulated before the first block, from what `Pairs` calls q and q_features."""
        del q_BHLK, q_features
        return Carry()

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        """Turns the content logits of one block of keys into the logits of attention.

        Returns:
          (logits_BHLM, carry). Values at masked pairs are ignored but must be finite in their gradient.
        """
        return pairs.logits, carry

    def saturated(self, carry: Carry) -> Array | None:
        """True for the rows whose logits no longer depend on what the carry accumulates: saturated_BHL.

        Once all rows of a block are saturated, `tail` gives the logits of the keys that are farther still. None: this
        encoding never saturates.
        """
        del carry
        return None

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        """logits_BHLM as `score` has them, for a block whose rows are all saturated. The carry stays as it is."""
        return self.score(pairs, carry)[0]

    def done(self, carry: Carry) -> Array | None:
        """True for the rows to which all farther keys weigh nothing, done_BHL: blocks in which all are, are skipped.

        None: keys weigh something however far they are.
        """
        del carry
        return None

    def sink(self, carry: Carry) -> Array | None:
        """One more logit after the last block, logit_BHL; None if the encoding has no sink.

        `sink_value` says which value it weighs.

        It takes weight from the keys, which then sum to less than 1.
        """
        del carry
        return None

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Named `[B, H, L, M]` maps worth looking at, over all keys at once: CoPE's gates, say. Default: none."""
        del pairs
        return {}

    def of_head(self, head: int) -> Self:
        """The encoding as one query head and its key head see it: attention of the head by it is the head's attention.

        An encoding with parameters or constants of each head slices them, with `_one_head`; one that mixes heads raises
        ConfigError.
        """
        del head
        return self._one_head()

    def _one_head(self, **attributes: Any) -> Self:
        """A copy for one head, with other attributes, such as parameters of that head alone."""
        one = copy.copy(self)
        one.shape = dataclasses.replace(self.shape, num_heads=1, num_kv_heads=1, model_dim=self.shape.width)
        for name, value in attributes.items():
            setattr(one, name, value)
        return one


ENCODINGS: Registry[type[Encoding]] = Registry("encoding")
