"""Attention with a score that is a plain function."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.attend import attend, attend_request
from cope_jax.attention.checks import check_arrays
from cope_jax.attention.request import prepare
from cope_jax.encodings import AttentionShape, Carry, Encoding, Pairs
from cope_jax.errors import ConfigError, first_line
from cope_jax.registry import checked, unknown

Hook = Callable[..., Any]
FIXED = ("q_BLHK", "k_BMGK", "v_BMGK", "encoding", "x", "embedded")
"""Arguments of `attend` that are no options here."""


def flex_attention(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    *,
    score: Hook,
    carry: Hook | None = None,
    saturated: Hook | None = None,
    tail: Hook | None = None,
    done: Hook | None = None,
    sink: Hook | None = None,
    params: Mapping[str, PyTree] | None = None,
    per_head: Iterable[str] = (),
    features: PyTree = None,
    **options: Any,
) -> Array:
    """Computes attention whose logits are those of a function, which may carry sums along the keys.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)).

    Keys are visited in blocks, from the nearest to the farthest. `score(pairs, carry)` returns the
    logits of one block and the carry for the farther ones, as `cope_jax.encodings.Encoding.score`
    does, and keeps the same laws. The kernels of CPUs, TPUs and GPUs are made from these functions,
    with their gradients. There is no form for a cache: to decode, write an `Encoding`.

    >>> import jax, jax.numpy as jnp
    >>> from cope_jax.encodings import Carry
    >>> from cope_jax.ops.sums import suffix_sum
    >>> def start(q, params):
    ...     return Carry(sums=jnp.zeros(q.shape[:3]))
    >>> def score(pairs, carry, params):  # 0.1 less for each open gate between query and key
    ...     gates = jnp.where(pairs.mask, jax.nn.sigmoid(pairs.logits), 0)
    ...     counts = carry.sums[..., None] + suffix_sum(gates)
    ...     slopes = params["slopes"][None, :, None, None]
    ...     return pairs.logits - slopes * counts, carry._replace(sums=counts[..., 0])
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    >>> params = {"slopes": jnp.full(2, 0.1)}
    >>> flex_attention(q, k, v, score=score, carry=start, params=params, per_head=["slopes"]).shape
    (1, 5, 2, 8)

    Args:
      q_BLHK: queries, and as they are, `pairs.q`: turn them before, if they turn.
      k_BMGK: keys; G divides H.
      v_BMGK: values.
      score: `(pairs, carry) → (logits, carry)`.
      carry: `q_BHLK → Carry`, what `score` gets with the nearest block; None means an empty one.
      saturated: `carry → bool_BHL`, see `Encoding.saturated`; None means never.
      tail: `(pairs, carry) → logits` of blocks in which all rows are saturated; None means those of
        `score`.
      done: `carry → bool_BHL`, see `Encoding.done`; None means never.
      sink: `carry → logit_BHL`, see `Encoding.sink`; None means no sink.
      params: arrays by name that all these functions get as their last argument, if it is given.
        Gradients reach these arrays. Those of an array that a function reads from around it work in
        "full", which "auto" takes for short sequences, and are a ConfigError in the others.
      per_head: the names of those whose first axis goes over the H query heads. In a kernel that
        computes one head, this axis has one entry.
      features: a tree of arrays `[B, M, heads, ...]` with H or 1 heads, of the M key tokens. They are
        `pairs.k_features`, head before token, and those of the last L tokens are `pairs.q_features`.
        None means that there are none.
      **options: those of `attend`: causal, window, mask, bias, scale, segments, positions, dropout,
        implementation and its sizes.

    Returns:
      out_BLHK, in the type of the values.

    Raises:
      ConfigError: as `attend`; or a name in `per_head` is not in `params`, or has no axis for heads.

    Each new function is traced and compiled again: define functions once.
    """
    allowed = [name for name in inspect.signature(attend).parameters if name not in FIXED]
    for name in options:
        if name not in allowed:
            raise unknown("option of flex_attention", name, allowed)
    check_arrays(q_BLHK, k_BMGK, v_BMGK)
    hooks = Hooks(score, carry, saturated, tail, done, sink, takes_params=params is not None)
    shape = AttentionShape(q_BLHK.shape[2], q_BLHK.shape[3], k_BMGK.shape[2])
    checked(per_head, tuple[str, ...], "per_head of flex_attention")
    params = checked({} if params is None else params, Mapping, "params of flex_attention")
    for leaf in jax.tree.leaves(features):
        if np.ndim(leaf) > 2 and np.shape(leaf)[2] not in (1, shape.num_heads):
            raise ConfigError(
                f"features of flex_attention must have {shape.num_heads} heads or 1, got {list(np.shape(leaf))}"
            )
    encoding = FlexAttention(hooks, shape, jax.tree.map(jnp.asarray, dict(params)), tuple(per_head))
    given = prepare(q_BLHK, k_BMGK, v_BMGK, encoding=encoding, features=features, **options)
    return attend_request(encoding, given)


ARGUMENTS = {
    **dict.fromkeys(("score", "tail"), ("pairs", "carry")),
    **dict.fromkeys(("saturated", "done", "sink"), ("carry",)),
    "carry": ("q",),
}
"""The arguments of each function; with parameters, `params` follows."""


def _takes(function: Hook, count: int) -> bool:
    """True if a function takes `count` arguments, or does not say."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The functions, and whether they take parameters."""

    score: Hook
    carry: Hook | None
    saturated: Hook | None
    tail: Hook | None
    done: Hook | None
    sink: Hook | None
    takes_params: bool

    def __post_init__(self):
        for field in dataclasses.fields(self)[:-1]:
            hook = getattr(self, field.name)
            if not callable(hook) and (hook is not None or field.name == "score"):
                raise ConfigError(
                    f"{field.name} of flex_attention must be a function, got {hook!r}"
                )
            wanted = (*ARGUMENTS[field.name], *["params"] * self.takes_params)
            if hook is not None and not _takes(hook, len(wanted)):
                more = not self.takes_params and _takes(hook, len(wanted) + 1)
                hint = "; one more gets what is given as params={...}" if more else ""
                raise ConfigError(
                    f"{field.name} of flex_attention must take the arguments ({', '.join(wanted)}){hint}"
                )


class FlexAttention(Encoding):
    """The encoding of plain functions."""

    def __init__(
        self,
        hooks: Hooks,
        shape: AttentionShape,
        params: dict[str, PyTree],
        per_head: tuple[str, ...],
    ):
        super().__init__(self.Config(), shape, rngs=nnx.Rngs(0))
        self.hooks = hooks
        for name in per_head:
            if name not in params:
                raise unknown("name in per_head", name, params)
            for leaf in jax.tree.leaves(params[name]):
                if leaf.shape[:1] != (shape.num_heads,):
                    raise ConfigError(
                        f"params[{name!r}] is in per_head, so its first axis must have the {shape.num_heads} heads "
                        f"of q, [B, L, H, K], got {list(leaf.shape)}"
                    )
        leaves, self.tree = jax.tree.flatten_with_path(params)
        self.count = len(leaves)
        for number, (path, leaf) in enumerate(leaves):
            first = "heads" if path[0].key in per_head else None
            axes = (first, *[None] * (leaf.ndim - 1)) if leaf.ndim else ()
            setattr(self, f"param_{number}", nnx.Param(leaf, axes=axes))

    def _call(self, hook: Hook, *args: Any) -> Any:
        if not self.hooks.takes_params:
            return hook(*args)
        leaves = [getattr(self, f"param_{number}")[...] for number in range(self.count)]
        return hook(*args, jax.tree.unflatten(self.tree, leaves))

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry() if self.hooks.carry is None else self._call(self.hooks.carry, q_BHLK)

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        try:
            return self._call(self.hooks.score, pairs, carry)
        except TypeError as error:
            if self.hooks.carry is not None:
                raise
            raise ConfigError(
                f"score of flex_attention failed ({first_line(error)}): it gets an empty carry, as no function is "
                "given as carry=..."
            ) from error

    def saturated(self, carry: Carry) -> Array | None:
        hook = self.hooks.saturated
        return None if hook is None else self._call(hook, carry)

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        hook = self.hooks.tail
        return super().tail(pairs, carry) if hook is None else self._call(hook, pairs, carry)

    def done(self, carry: Carry) -> Array | None:
        return None if self.hooks.done is None else self._call(self.hooks.done, carry)

    def sink(self, carry: Carry) -> Array | None:
        return None if self.hooks.sink is None else self._call(self.hooks.sink, carry)
