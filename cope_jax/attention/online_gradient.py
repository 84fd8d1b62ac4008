"""The gradient of a strip: one more pass over the keys, near to far, that recomputes what the forward pass forgot."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.attention.online import over_blocks
from cope_jax.attention.products import over_keys, over_queries, scaled_products
from cope_jax.attention.strips import Keys, Queries, Rules, add_cotangent
from cope_jax.ops.dropout import Dropout
from cope_jax.typing import Array, PyTree, accumulator_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the forward pass of a strip left, with the cotangent of its output.

    Attributes:
      dout: BHLK.
      shift: Σ dout·out, D_BHL.
      logsumexp: BHL.
      pulls: Σ dout·∂out/∂carry, R_BHL for each running sum: the gradient of the carry before the first block.
    """

    dout: Array
    shift: Array
    logsumexp: Array
    pulls: tuple[Array, ...]

    @classmethod
    def of(cls, dout: Array, out: Array, logsumexp: Array, sensitivities: tuple[Array, ...]) -> "Outcome":
        """From what `online.finish` returned."""
        wide = dout.astype(logsumexp.dtype)
        pulls = tuple((wide * s).sum(axis=-1) for s in sensitivities)
        return cls(dout, (wide * out.astype(wide.dtype)).sum(axis=-1), logsumexp, pulls)

    def strip(self, number: Array, size: int) -> "Outcome":
        """The part of the strip with this number."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=2), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyGradients:
    """Gradients of `Keys`, in the accumulator type; those of k and v with the keys last, `[B, G, K, M]`."""

    k: Array
    v: Array
    features: PyTree

    @classmethod
    def zeros(cls, keys: Keys) -> "KeyGradients":
        def zeros(x: Array) -> Array:
            return jnp.zeros(x.shape, accumulator_dtype(x.dtype))

        return cls(
            zeros(jnp.swapaxes(keys.k, 2, 3)), zeros(jnp.swapaxes(keys.v, 2, 3)), jax.tree.map(zeros, keys.features)
        )

    def of(self, keys: Keys) -> Any:
        """As the cotangent of `keys`, in its types."""
        like = (keys.k, keys.v, keys.features)
        cast = jax.tree.map(
            lambda x, y: x.astype(y.dtype), (*(jnp.swapaxes(x, 2, 3) for x in (self.k, self.v)), self.features), like
        )
        none: Any = None  # integers have no cotangent
        return dataclasses.replace(
            keys, k=cast[0], v=cast[1], features=cast[2], positions=none, places=none, segment_ids=none
        )

    def add(self, end: Array | int, k: Array, v: Array, features: PyTree) -> "KeyGradients":
        """Adds to the block of keys before `end`: see `Keys.block`."""
        start = jnp.maximum(end - k.shape[-1], 0)

        def add(axis: int, whole: Array, part: Array) -> Array:
            if part.dtype == jax.dtypes.float0:
                return whole
            old = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[axis], axis)
            return jax.lax.dynamic_update_slice_in_dim(whole, old + part.astype(whole.dtype), start, axis)

        return KeyGradients(
            add(3, self.k, k), add(3, self.v, v), jax.tree.map(functools.partial(add, 1), self.features, features)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What the pass has gathered so far.

    Attributes:
      carry: the encoding's carry, as in the forward pass.
      pulls: of each running sum, what the keys that are still to come will pull on it.
      constants: gradient of the carry's constant leaves.
      q, rotated_q: BHLK.
      params: of the encoding.
      keys: of all keys.
    """

    carry: PyTree
    pulls: tuple[Array, ...]
    constants: tuple[Array, ...]
    q: Array
    rotated_q: Array
    params: PyTree
    keys: KeyGradients


def start(rules: Rules, params: PyTree, queries: Queries, outcome: Outcome, keys: KeyGradients) -> Gradients:
    """The state before the first block; `keys` is what other strips have gathered."""
    dtype = accumulator_dtype(queries.q.dtype)
    carry = rules.initial_carry(params, queries.q)
    constants = tuple(jnp.zeros_like(leaf) for leaf in rules.constants(carry))
    zeros = jnp.zeros(queries.q.shape, dtype)
    return Gradients(carry, outcome.pulls, constants, zeros, zeros, jax.tree.map(jnp.zeros_like, params), keys)


def pull(
    rules: Rules,
    params: PyTree,
    queries: Queries,
    keys: Keys,
    outcome: Outcome,
    state: Gradients,
    drop: Dropout | None,
) -> Gradients:
    """The gradient of `online.accumulate`, over the same blocks in the same order.

    With A the attention and S the logits: dS = A (dout·v − D). A running sum that leaves a block has yet to feed the
    blocks that follow, which pull R − Σ dS·∂S/∂carry on it, summed over what has been seen; so `score`'s own VJP of one
    block gets (dS, that), and nothing has to be known of farther blocks.
    """

    def step(end: Array, state: Gradients, *, size: int, masked: bool, settled: bool) -> Gradients:
        block = keys.block(end, size)
        mask_B1LM = rules.block_mask(queries, block, masked)
        logits_BHLM = scaled_products(queries.rotated_q, block.k)
        hook = functools.partial(rules.hook, queries=queries, keys=block)
        arguments = (params, queries.q, block.k, block.features, logits_BHLM, mask_B1LM, state.carry)
        if settled:
            scored_BHLM, pull_score = _vjp(hook("settled_score"), *arguments)
            carry = state.carry
        else:
            (scored_BHLM, carry), pull_score = _vjp(hook("score"), *arguments)
        weights_BHLM = jnp.where(mask_B1LM, jnp.exp(scored_BHLM - outcome.logsumexp[..., None]), 0)
        dweights_BHLM = scaled_products(outcome.dout.astype(block.v.dtype), block.v, scale=1.0)
        kept_BHLM = weights_BHLM
        if drop is not None:
            scale_BHLM = drop(queries.places, block.places, weights_BHLM.dtype)
            kept_BHLM, dweights_BHLM = weights_BHLM * scale_BHLM, dweights_BHLM * scale_BHLM
        dscored_BHLM = weights_BHLM * (dweights_BHLM - outcome.shift[..., None])
        pulls = state.pulls
        if settled:
            dparams, dq, dk, dfeatures, dlogits, dcarry = pull_score(dscored_BHLM)
        else:
            own = pull_score((dscored_BHLM, rules.join(carry, map(jnp.zeros_like, pulls))))[-1]
            pulls = tuple(p - o for p, o in zip(pulls, rules.sums(carry, own), strict=True))
            farther = map(jnp.zeros_like, pulls) if rules.one_block else pulls
            dparams, dq, dk, dfeatures, dlogits, dcarry = pull_score((dscored_BHLM, rules.join(carry, farther)))
        dlogits = (dlogits / queries.q.shape[-1] ** 0.5).astype(block.k.dtype)
        groups = block.k.shape[1]
        return Gradients(
            carry,
            pulls,
            tuple(map(add_cotangent, state.constants, rules.constants(dcarry))),
            state.q + dq.astype(state.q.dtype),
            state.rotated_q + over_keys(dlogits, block.k),
            jax.tree.map(add_cotangent, state.params, dparams),
            state.keys.add(
                end,
                jnp.swapaxes(dk, 2, 3).astype(state.keys.k.dtype) + over_queries(queries.rotated_q, dlogits, groups),
                over_queries(outcome.dout.astype(block.v.dtype), kept_BHLM.astype(block.v.dtype), groups),
                dfeatures,
            ),
        )

    return over_blocks(rules, params, queries, keys, state, step)


def finish(rules: Rules, params: PyTree, queries: Queries, outcome: Outcome, state: Gradients) -> tuple[PyTree, Array]:
    """(gradient of the parameters, gradient of q before rotation): with what went through the initial carry."""
    carry, pull_carry = jax.vjp(rules.initial_carry, params, queries.q)
    pulled = [before - after for before, after in zip(outcome.pulls, state.pulls, strict=True)]
    dparams, dq = pull_carry(rules.join(carry, pulled, state.constants))
    return jax.tree.map(add_cotangent, state.params, dparams), state.q + dq.astype(state.q.dtype)


def _vjp(
    hook: Any, params: PyTree, q: Array, k: Array, features: PyTree, logits: Array, mask: Array, carry: PyTree
) -> Any:
    """The hook's value, and its VJP by all but the mask."""
    return jax.vjp(lambda p, q, k, f, x, c: hook(p, q, k, f, x, mask, c), params, q, k, features, logits, carry)
