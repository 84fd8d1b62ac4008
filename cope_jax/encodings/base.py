"""The contract of position encodings, and the registry of all encodings.

An encoding overrides the hooks that it needs; by default a hook changes nothing. Attention always
calls every hook, in this order, and never refers to an encoding by name:

1. `embed`          once, on the token embeddings, at the bottom of the model.
2. `features`       in each layer, once for each token, on the layer's input, queries, keys and
   values.
3. `rotate`         in each attention call, on queries; `rotate_keys` on keys and `rotate_values` on
   values, which a cache holds rotated.
4. `initial_carry`  in each attention call.
5. `score`          once for each block of keys, **from the block nearest to the query to the
   farthest**.
6. `sink`           once, after the last block.
7. `rotate_back`    on the output, if values were rotated.

What an encoding accumulates over pairs goes into the carry; what it computes for each token goes
into the features.

An encoding that keeps these laws runs in every implementation of attention:

- **Blocks.** Values and gradients do not depend on how the keys are split into blocks. Attention
  visits blocks from the nearest to the farthest, and passes on the carry. An encoding that cannot
  keep this law declares `splits_keys=False`.
- **Rows.** The result does not depend on how the queries are split: each row of the logits and of
  the carry depends only on its own query. An encoding that cannot keep this law declares
  `splits_queries=False`.
- **Decoding.** Reading one token at a time, with cached features and `state`, gives the same result
  as reading the complete sequence.
- **Devices.** Any split of the sequence over devices gives the same result.
- **Maps.** `maps` returns the values that `score` used.

In `score`, `tail`, `saturated`, `done`, `sink` and `initial_carry`, use only `cope_jax.ops`,
arithmetic, products and static slices on arrays. Do not use gathers, flips, cumulative sums or
barriers: a kernel that traces these hooks can replace only the functions of `cope_jax.ops`.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.registry import Registry, abridged, check_at_least, check_fields, checked


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """The sizes that every encoding is built for.

    Attributes:
      num_heads: H, the number of query heads.
      head_dim: K, the width of one head.
      num_kv_heads: G, the number of key/value heads; None means H.
      model_dim: D, the width of the model; None means H·K.
      max_length: the length of the longest sequence that the model will see; some tables have this
        number of rows. None means that the length is not known.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    model_dim: int | None = None
    max_length: int | None = None

    def __post_init__(self):
        check_fields(self, "attention")
        check_at_least(1, "attention", **dataclasses.asdict(self))
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.kv_heads}"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim if self.model_dim is None else self.model_dim


@dataclasses.dataclass(frozen=True)
class PerHead:
    """Constants of an encoding, one for each query head."""

    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The config of an encoding without options."""


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of an encoding that attention, models and compositions need before its hooks.

    A class declares `traits = Traits(...)`; an instance whose options matter replaces it in its
    constructor.

    Attributes:
      embeds_input: whether `embed` adds to the token embeddings. If True, all layers share one
        instance.
      splits_keys: whether the encoding keeps the law of blocks. If False, attention takes all keys
        as one block, and ring attention raises ConfigError.
      splits_queries: whether the encoding keeps the law of rows. If False, only full attention can
        run the encoding, and the other implementations raise ConfigError.
      splits_heads: whether no head depends on another. If False, kernels, which compute one head at
        a time, refuse it.
      takes_masks: whether a given mask may hide keys between a query and a key that the query sees.
        If False, attention refuses masks.
      reads_logits: whether `score` reads `pairs.logits`. If False, the encoding computes its own
        products, and attention refuses a bias, a scale and a soft cap of the content logits.
      causal_only: whether the encoding requires causal attention. If True, models that see both
        sides refuse it.
      excludes: hooks, "rotate", "rotate_values" or "score", that no other part of a composition may
        override, because the encoding computes the logits of its own queries and keys, reads
        values, or computes weights that sum to 1.
      turns_values: whether `rotate_values`, if overridden, changes values; False if an option
        disables it.
      heavy_score: whether `score` is expensive; kernels then use small blocks.
      sink_value: the value vector of the sink. "zero" means 0, and "own" means the value of the
        query's own token.
    """

    embeds_input: bool = False
    splits_keys: bool = True
    splits_queries: bool = True
    splits_heads: bool = True
    takes_masks: bool = True
    reads_logits: bool = True
    causal_only: bool = False
    excludes: tuple[str, ...] = ()
    turns_values: bool = True
    heavy_score: bool = False
    sink_value: Literal["zero", "own"] = "zero"

    @staticmethod
    def of_composition(parts: Iterable["Traits"]) -> "Traits":
        """Returns the traits of encodings that act together: those in which any of them differs
        from the default.
        """
        every = (item for traits in parts for item in vars(traits).items())
        return Traits(**{name: value for name, value in every if value != getattr(Traits, name)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The M tokens of one layer that one call of `features` reads: all that features may depend on.

    Attributes:
      x: x_BMD, the input of the attention layer, or None if the caller does not have it.
      q: q_BMHK before rotation. Features of a token may depend on its own query only: for tokens
        before the first query, whose queries a caller does not give, these are zeros.
      k: k_BMGK before rotation.
      v: v_BMGK.
      positions: int32 or float32, `[B, M]` or `[1, M]`.
      segment_ids: int32 `[B, M]` or `[1, M]`, the document of each token; None means one document.
        Nothing may pass from one document into the next: running sums start again, and windows over
        tokens end. The tokens of a document should be neighbours: sums start again after a hole in
        it too, though attention sees the tokens before the hole.
    """

    x: Array | None
    q: Array
    k: Array
    v: Array
    positions: Array
    segment_ids: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
    """One block of L queries and M keys: everything that the logits of the block may depend on.

    Attributes:
      q: q_BHLK before rotation, so that added terms depend on a query's position only through
        `q_positions`.
      k: k_BGMK after rotation, as in a cache.
      v: v_BGMK after rotation.
      q_features: `Encoding.features` of the queries' tokens, each leaf `[B, heads, L, ...]` with H,
        G or 1 heads.
      k_features: `Encoding.features` of the keys' tokens, `[B, heads, M, ...]`.
      logits: logits_BHLM, q·k/√K after rotation, in the accumulator type, not yet masked.
      mask: mask_B1LM, True where the query may see the key. The gate of any other pair must be
        exactly 0.
      q_positions: int32 or float32, `[B, L]` or `[1, L]`.
      k_positions: the same type, `[B, M]` or `[1, M]`.
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
        """distance_B1LM, the query's position minus the key's position, i − j; negative for a key
        after the query.
        """
        return (self.q_positions[:, :, None] - self.k_positions[:, None, :])[:, None]


class Carry(NamedTuple):
    """The sums of `score` over all keys nearer to the query than the current block.

    Attributes:
      sums: running sums, a tree of floating-point arrays `[B, H, L]`. The terms that `score` adds must not depend
        on the sums. Streaming attention computes the gradients of all sums in one pass.
      constants: a tree of arrays `[B, H, L, ...]` that `score` passes on unchanged.
      state: anything else, a tree of arrays `[B, H, L, ...]`. With a state, streaming attention
        takes all keys as one block.
    """

    sums: PyTree = ()
    constants: PyTree = ()
    state: PyTree = ()


class Encoding(nnx.Module):
    """Base class of encodings; by default its hooks change nothing.

    A subclass overrides the hooks that it needs, and declares its options in a frozen dataclass,
    `Config`. The constructor of a subclass accepts `(config, shape, *, rngs)`.

    Logits, gates and sums of gates are float32 in every compute type (float64 for float64 inputs).
    The positions of tokens are arrays of shape `[B, L]` or `[1, L]`, int32 or float32. These
    positions may be consecutive, offset, random, or start again in each segment, so never assume
    `arange`.
    """

    Config: ClassVar[type] = NoOptions
    traits: Traits = Traits()

    def __init__(self, config: Any, shape: AttentionShape, *, rngs: nnx.Rngs):
        for name, value, kind in (
            ("config", config, self.Config),
            ("shape", shape, AttentionShape),
            ("traits", self.traits, Traits),
        ):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{type(self).__name__}.{name} must be {kind.__name__}, got {abridged(value)}"
                )
        check_fields(config, type(config).__name__)
        checked(rngs, nnx.Rngs, "rngs")
        self.config = config
        self.shape = shape

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        """Adds position embeddings to the token embeddings, and returns the sum, x_BLD."""
        del positions_BL
        return x_BLD

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        """Computes the features of each token, which `rotate`, `initial_carry` and `score` use for
        queries and keys.

        Args:
          tokens: the tokens.
          state: the state that the call for the previous tokens returned. At the start of a
            sequence it is None, which must mean the same as zeros.

        Returns:
          (features, state). Features are a tree of arrays `[B, M, heads, ...]` with H, G or 1
          heads. A cache keeps them for decoding. State is a tree of arrays `[B, ...]`, which
          contains what the features of later tokens need from these tokens, such as a running sum
          or the last inputs of a convolution.
        """
        del tokens, state
        return (), ()

    def checked_features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        """Returns what `features` returns. ConfigError: this is no pair."""
        pair: object = self.features(tokens, state)
        if not isinstance(pair, tuple) or len(pair) != 2:
            name = type(self).__name__
            raise ConfigError(f"features of {name} must return the features and the state, a pair")
        return pair

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        """Transforms queries, and by default keys, before their product; `features` are those of
        the same tokens. The width may change: attention still divides by the root of the old one.
        """
        del features, positions_BL
        return x_BLHK

    def rotate_keys(self, k_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        """Transforms keys before the product, by default as `rotate` does."""
        return self.rotate(k_BMGK, features, positions_BM)

    def rotate_values(self, v_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        """Transforms values before they are summed; the shape stays."""
        del features, positions_BM
        return v_BMGK

    def rotate_back(self, out_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        """Transforms the sum of values of each query, whose features these are: the reverse of
        `rotate_values` gives what depends on query and key the meaning of a difference.
        """
        del features, positions_BL
        return out_BLHK

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        """Returns the carry before the first block; q and q_features are as in `Pairs`."""
        del q_BHLK, q_features
        return Carry()

    def checked_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        """Returns what `initial_carry` returns. ConfigError: this is no `Carry`, or a sum is no
        floating-point number for each query and head.
        """
        carry: object = self.initial_carry(q_BHLK, q_features)
        name, wanted = type(self).__name__, list(q_BHLK.shape[:3])
        if not isinstance(carry, Carry):
            raise ConfigError(
                f"the carry of {name} must be a Carry, got {type(carry).__name__}: return "
                "Carry(sums=…)"
            )
        for leaf in jax.tree.leaves(carry.sums):
            shape, dtype = list(np.shape(leaf)), jax.numpy.result_type(leaf)
            if shape != wanted or not jax.numpy.issubdtype(dtype, np.floating):
                raise ConfigError(
                    f"the sums of the carry of {name} must be floating-point numbers {wanted}, got "
                    f"{dtype} {shape}: put anything else into its constants or its state"
                )
        return carry

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        """Turns the content logits of one block of keys into the logits of attention.

        Returns:
          (logits_BHLM, carry). Logits of masked pairs are ignored, but their gradients must be
          finite.
        """
        return pairs.logits, carry

    def checked_score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        """Returns what `score` returns. ConfigError: this is no pair, its first part is not the
        logits of these pairs, or its second part has another form than the carry.
        """
        scored: object = self.score(pairs, carry)
        name, wanted = type(self).__name__, pairs.logits
        if not isinstance(scored, tuple) or len(scored) != 2:
            raise ConfigError(f"score of {name} must return the logits and the carry, a pair")
        shape: Any = getattr(scored[0], "shape", None)
        dtype: Any = getattr(scored[0], "dtype", None)
        if shape != wanted.shape or np.promote_types(dtype, wanted.dtype) != dtype:
            given = type(scored[0]).__name__ if dtype is None else f"{dtype} {list(shape or ())}"
            if shape and len(shape) == 4 and wanted.shape[1] == 1 < shape[1]:
                given += ': a kernel computes one head, so say which axis of parameters is "heads" (axes, per_head)'
            raise ConfigError(
                f"score of {name} must return logits of pairs.logits' type and shape, "
                f"{wanted.dtype} {list(wanted.shape)}, got {given}"
            )
        form, of_scored = _form(carry), _form(scored[1])
        if form != of_scored:
            raise ConfigError(
                f"score of {name} must return a carry like the one that it gets, {form}, got {of_scored}"
            )
        return scored

    def saturated(self, carry: Carry) -> Array | None:
        """Returns saturated_BHL, True for rows whose farther logits no longer depend on what the
        carry accumulates.

        Once all rows of a block are saturated, `tail` gives the logits of all farther keys. None
        means that no row is ever saturated.
        """
        del carry
        return None

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        """Returns the logits_BHLM of `score` for a block whose rows are all saturated.

        The carry does not change.
        """
        return self.score(pairs, carry)[0]

    def done(self, carry: Carry) -> Array | None:
        """Returns done_BHL, True for the rows in which no farther key has any weight.

        Once all rows are done, farther blocks are skipped. None means that keys have weight at any
        distance.
        """
        del carry
        return None

    def sink(self, carry: Carry) -> Array | None:
        """Returns logit_BHL of the sink, one more entry of each softmax, or None if the encoding
        has no sink.

        The value of this entry is `traits.sink_value`. The sink takes part of the weight, so the
        weights of the keys sum to less than 1.
        """
        del carry
        return None

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Returns maps for inspection by name, such as CoPE's gates, each `[B, H, L, M]` over all
        keys.

        By default there are no maps.
        """
        del pairs
        return {}

    def of_head(self, head: int, shape: AttentionShape | None = None) -> Self:
        """Returns the encoding for one query head with its key head, which gives what it gives
        among all heads.

        Parameters say which of their axes goes over the heads,
        `nnx.Param(..., axes=("embed", "heads"))`, or "kv_heads"; constants for each head are a
        `PerHead`.

        Args:
          head: the index of the query head.
          shape: the shape that the result has; None means that of one head. Kernels give that of
            all heads: what hooks compute from the number of heads must not change.

        Raises:
          ConfigError: the heads depend on each other.
        """
        if not self.traits.splits_heads:
            raise ConfigError(
                f"{type(self).__name__} mixes all heads: it cannot run for one head alone"
            )
        index = {"heads": head, "kv_heads": head * self.shape.kv_heads // self.shape.num_heads}
        alone = copy.copy(self)
        alone.shape = shape or dataclasses.replace(
            self.shape, num_heads=1, num_kv_heads=1, model_dim=self.shape.width
        )
        for name, value in vars(self).items():
            if isinstance(value, Encoding):
                setattr(alone, name, value.of_head(head, shape))
            elif isinstance(value, PerHead):
                setattr(alone, name, PerHead(value.values[head : head + 1]))
            elif isinstance(value, nnx.Variable):
                setattr(alone, name, _of_head(value, index))
        return alone


def _form(carry: Any) -> str:
    """Describes the structure, types and shapes of a carry."""
    leaves, tree = jax.tree.flatten(carry)
    arrays = [f"{jax.numpy.result_type(leaf)}{list(np.shape(leaf))}" for leaf in leaves]
    return str(jax.tree.unflatten(tree, arrays)).replace("'", "")


def _of_head(variable: nnx.Variable[Any], index: Mapping[str, int]) -> nnx.Variable[Any]:
    """Returns the slice of a parameter for one head; `axes` names the last axes."""
    axes = variable.get_metadata().get("axes", ())
    here = tuple(
        slice(index[axis], index[axis] + 1) if axis in index else slice(None) for axis in axes
    )
    return variable.replace(variable[(..., *here)]) if index.keys() & set(axes) else variable


ENCODINGS: Registry[type[Encoding]] = Registry(
    "encoding",
    "one of your own needs its file (cj.encodings.load, --encoding=NAME.py of a command, or an "
    "import in cope_jax/encodings/__init__.py); else ",
)
