"""A call of attention, checked once, and what a backend answers to it: a plan, or the reason why it
has none.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import checks
from cope_jax.attention.blocks import BlockSizes, KeyBlock, QueryBlock, swap_heads
from cope_jax.attention.mask import Mask
from cope_jax.encodings import Encoding, Pairs, Tokens
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from cope_jax.ops.dropout import Dropout
from cope_jax.ops.grouped_matmul import content_logits
from cope_jax.registry import checked, unknown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `attend`, checked, with positions filled in and arrays rotated.

    Attributes:
      queries: all queries.
      keys: all keys and values, and arrays of pairs.
      drop: dropout on the attention weights, or None.
      causal: whether keys at later indices are hidden.
      window: keys that are `window` or more indices away from the query are hidden. If None, there
        is no window.
      scale: what multiplies q·k; None means 1/√K.
      soft_cap: the largest size of a content logit; None means no cap.
      implementation: the name of a backend, or "auto".
      blocks: the sizes of blocks; None if the backend chooses them.
      layout: the axes of the current mesh that split batch, sequence and heads.
      by_head: whether arrays are head-major, `[B, heads, L, ...]`; else they are the caller's,
        `[B, L, heads, ...]`.
    """

    queries: QueryBlock
    keys: KeyBlock
    drop: Dropout | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    implementation: str = dataclasses.field(default="auto", metadata={"static": True})
    blocks: BlockSizes | None = dataclasses.field(default=None, metadata={"static": True})
    layout: Layout = dataclasses.field(default=WHOLE, metadata={"static": True})
    by_head: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def mask(self) -> Mask:
        """The rule that says which keys each query may see."""
        queries, keys = self.queries, self.keys
        ids = queries.segment_ids, keys.segment_ids
        return Mask(queries.indices, keys.indices, *ids, keys.given, self.causal, self.window)

    @property
    def length(self) -> int:
        """L, the number of queries."""
        return len(self.queries.indices)

    @property
    def factor(self) -> float:
        """The factor of q·k: `scale`, or 1/√K with the width K before rotation."""
        return self.queries.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def head_major(self) -> "Request":
        """Returns the request with arrays `[B, heads, L, ...]`."""
        if self.by_head:
            return self
        queries, keys = swap_heads(self.queries), swap_heads(self.keys)
        return dataclasses.replace(self, queries=queries, keys=keys, by_head=True)

    def pairs(self, masked: bool = True) -> Pairs:
        """Returns all pairs as one block; if not `masked`, the mask is True everywhere."""
        request = self.head_major()
        queries, keys = request.queries, request.keys
        logits = content_logits(queries.content_q, keys.k, self.factor)
        if keys.bias is not None:
            logits = logits + keys.bias.astype(logits.dtype)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        shape = (1, 1, len(queries.indices), len(keys.indices))
        return Pairs(
            q=queries.q,
            k=keys.k,
            v=keys.v,
            q_features=queries.features,
            k_features=keys.features,
            logits=logits,
            mask=self.mask.dense() if masked else jnp.ones(shape, bool),
            q_positions=queries.positions,
            k_positions=keys.positions,
        )

    def content_gradients(
        self, logits_BHLM: Array, dlogits_BHLM: Array
    ) -> tuple[Array, Array | None]:
        """Returns the gradients of q·k and of the bias, for pairs whose content logits are
        `logits_BHLM`.
        """
        if self.soft_cap is not None:
            dlogits_BHLM = dlogits_BHLM * (1 - (logits_BHLM / self.soft_cap) ** 2)
        bias, dbias = self.keys.bias, None
        if bias is not None:
            same = [axis for axis in (0, 1) if bias.shape[axis] == 1]
            dbias = dlogits_BHLM.sum(axis=same, keepdims=True) if same else dlogits_BHLM
        return dlogits_BHLM * self.factor, dbias

    def zeros(self) -> Array:
        """Returns the out_BLHK of queries that see no key."""
        return jnp.zeros((*self.queries.q.shape[:3], self.keys.v.shape[-1]), self.keys.v.dtype)


class Reason(NamedTuple):
    """The reason that a backend cannot run a request, as the end of a sentence, and what to do
    instead.
    """

    why: str
    fix: str = "choose 'auto' or 'blockwise'"


class Plan(NamedTuple):
    """The way in which a backend runs a request.

    Attributes:
      name: what runs, for the log.
      run: computes out_BLHK, in the type of the values.
    """

    name: str
    run: Callable[[], Array]


def prepare(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    *,
    encoding: Encoding,
    x: Array | None = None,
    bias: Any = None,
    embedded: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
    q_segment_ids: Any = None,
    k_segment_ids: Any = None,
    mask: Any = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    features: PyTree = None,
    **execution: Any,
) -> Request:
    """Checks the arguments of `attend`, and calls the encoding's `features` and `rotate`; `features`
    that are given take the place of those.
    """
    _check_names(execution)
    checks.check_arrays(q_BLHK, k_BMGK, v_BMGK)
    # NumPy's float64 becomes float32 here, and not only where an encoding rotates.
    q_BLHK, k_BMGK, v_BMGK = (jnp.asarray(x) for x in (q_BLHK, k_BMGK, v_BMGK))
    checks.check_encoding(encoding, q_BLHK, k_BMGK, embedded)
    (batch, length, heads, _), keys = q_BLHK.shape, k_BMGK.shape[1]
    q_indices, k_indices = (
        np.arange(keys - length, keys, dtype=np.int32),
        np.arange(keys, dtype=np.int32),
    )
    q_positions = q_indices[None] if q_positions is None else q_positions
    k_positions = k_indices[None] if k_positions is None else k_positions
    if (q_segment_ids is None) != (k_segment_ids is None):
        raise ConfigError("q_segment_ids and k_segment_ids belong together: give both, or neither")
    dtype = accumulator_dtype(q_BLHK.dtype)
    q_positions = checks.checked_positions("q_positions", q_positions, batch, length, dtype)
    k_positions = checks.checked_positions("k_positions", k_positions, batch, keys, dtype)
    if q_positions.dtype != k_positions.dtype:
        q_positions = checks.as_real("q_positions", q_positions, dtype)
        k_positions = checks.as_real("k_positions", k_positions, dtype)
    q_segment_ids = checks.checked_integers("q_segment_ids", q_segment_ids, batch, length)
    k_segment_ids = checks.checked_integers("k_segment_ids", k_segment_ids, batch, keys)
    if mask is not None and not encoding.traits.takes_masks:
        raise ConfigError(
            "this encoding needs an unbroken run of keys: leave mask out, or choose another encoding"
        )
    x = checks.checked_input(x, batch, keys)
    tokens = Tokens(x, _queries_of_keys(q_BLHK, keys), k_BMGK, v_BMGK, k_positions, k_segment_ids)
    if features is None:
        features, _ = encoding.checked_features(tokens, None)
    checks.check_features(encoding, features, k_BMGK, heads)
    checks.check_tokens(encoding, features, length, keys)
    q_features = jax.tree.map(lambda feature: feature[:, keys - length :], features)
    rotated_q = checks.rotated(encoding, q_BLHK, q_features, q_positions)
    rotated_k = checks.turned(encoding, "rotate_keys", k_BMGK, features, k_positions)
    v_BMGK = checks.turned(encoding, "rotate_values", v_BMGK, features, k_positions)
    q_v = v_BMGK[:, keys - length :] if encoding.traits.sink_value == "own" else None
    queries = QueryBlock(q_BLHK, rotated_q, q_v, q_features, q_positions, q_indices, q_segment_ids)
    given = checks.checked_mask(mask, (batch, 1, length, keys))
    shape = batch, heads, length, keys
    bias, scale, cap = checks.checked_logits(encoding, bias, scale, logits_soft_cap, shape)
    return Request(
        queries,
        KeyBlock(rotated_k, v_BMGK, features, k_positions, k_indices, k_segment_ids, given, bias),
        Dropout.create(dropout_key, checks.checked_rate(dropout_rate, dropout_key), batch, heads),
        causal=checked(causal, bool, "causal"),
        window=checks.checked_window(window),
        scale=scale,
        soft_cap=cap,
        **checked_execution(**execution),
    )


def _check_names(execution: Iterable[str]) -> None:
    """Raises ConfigError for a name that is not an argument of `attend`."""
    known = inspect.signature(checked_execution).parameters
    for name in execution:
        if name not in known:
            parameters = inspect.signature(prepare).parameters.values()
            others = {item.name for item in parameters if item.kind is item.KEYWORD_ONLY}
            raise unknown("argument of attend", name, [*known, *sorted(others - {"features"})])


def _queries_of_keys(q_BLHK: Array, keys: int) -> Array:
    """Returns q_BMHK: the last M queries, or zeros for earlier tokens, whose queries the caller
    does not give.
    """
    earlier = keys - q_BLHK.shape[1]
    return (
        q_BLHK[:, -earlier:]
        if earlier <= 0
        else jnp.pad(q_BLHK, [(0, 0), (earlier, 0), (0, 0), (0, 0)])
    )


def checked_execution(
    implementation: str = "auto",
    sequence_axis: str | None = None,
    batch_axes: Sequence[str] = (),
    head_axis: str | None = None,
    blocks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns the fields of a request that choose how it runs."""
    checked(implementation, str, "implementation")
    blocks = checked(blocks, tuple[int, ...] | None, "blocks")
    if blocks is not None and (len(blocks) != 3 or min(blocks) < 1):
        raise ConfigError(f"blocks must be three sizes of at least 1, got {blocks}")
    layout = Layout(
        checked(batch_axes, tuple[str, ...], "batch_axes"),
        checked(sequence_axis, str | None, "sequence_axis"),
        checked(head_axis, str | None, "head_axis"),
    )
    _check_axes(layout)
    return {
        "implementation": implementation,
        "blocks": None if blocks is None else BlockSizes(*blocks),
        "layout": layout,
    }


def _check_axes(layout: Layout) -> None:
    """Raises ConfigError if two axes of arrays are split by the same axis of the mesh."""
    uses = [(axis, "batch_axes") for axis in layout.batch]
    others = {"sequence_axis": layout.length, "head_axis": layout.width}
    uses += [(axis, argument) for argument, axis in others.items() if axis is not None]
    for axis, _ in uses:
        arguments = [argument for name, argument in uses if name == axis]
        if len(arguments) > 1:
            raise ConfigError(
                f"the axis {axis!r} of the mesh is named twice, in {' and '.join(dict.fromkeys(arguments))}: "
                "name each axis once"
            )
