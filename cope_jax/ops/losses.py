"""Losses of next-token prediction, over all or sampled classes, and the metrics of a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, accumulator_dtype
from cope_jax.ops.gather import checked_indices, lookup


def cross_entropy(logits_BLV: Array, targets_BL: Array) -> Array:
    """Returns −log softmax(logits)[target] of each token, in nats, shape `[B, L]`.

    >>> round(float(cross_entropy(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32))[0, 0]), 4)
    1.3863
    """
    # A target outside of the vocabulary gives NaN; a negative one would count from the end.
    known_BL = checked_indices(targets_BL, logits_BLV.shape[-1])
    target_BL1 = jnp.take_along_axis(logits_BLV, known_BL[..., None], axis=-1)
    return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL1[..., 0]


def is_wrong(logits_BLV: Array, targets_BL: Array) -> Array:
    """Returns whether another token than the target is the most probable, or none is, `[B, L]`."""
    best_BL = jax.lax.argmax(logits_BLV, 2, jnp.int32)  # the first NaN if there is one
    best_BL1 = jnp.take_along_axis(logits_BLV, best_BL[..., None], axis=-1)
    return (best_BL != targets_BL.astype(jnp.int32)) | jnp.isnan(best_BL1[..., 0])


def token_measures(
    logits_BLV: Array,
    targets_BL: Array,
    weights_BL: Array,
    valid_BLV: Array | None = None,
    repeated_BL: Array | None = None,
) -> dict[str, tuple[Array, Array]]:
    """Returns `loss`, `token_error` and `sequence_error` of a batch, each as (sum, weight).

    The loss, in nats, and the token error are weighted means over tokens. The token error is the
    share of targets that are not the most probable token. The sequence error is the share of
    sequences with a wrong token, among the sequences that have a token of weight above 0.

    With `valid_BLV`, 1 for each token that may follow and 0 for others, there are two more:
    `invalid_error` is the probability of all tokens that may not follow, and `valid_error` is the
    share of the tokens that may follow but are not more probable than all invalid tokens together.

    With `repeated_BL`, 1 for some tokens and 0 for others, `repeated_loss` and `other_loss` are the
    losses of these and of the others.

    >>> metrics = token_measures(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), jnp.ones((1, 2)))
    >>> {name: float(total / weight) for name, (total, weight) in metrics.items()}
    {'loss': 1.38..., 'token_error': 0.5, 'sequence_error': 1.0}
    """
    wrong_BL = weights_BL * is_wrong(logits_BLV, targets_BL).astype(weights_BL.dtype)
    tokens, loss_BL = jnp.sum(weights_BL), cross_entropy(logits_BLV, targets_BL)
    measures = {
        "loss": (jnp.sum(weights_BL * loss_BL), tokens),
        "token_error": (jnp.sum(wrong_BL), tokens),
        "sequence_error": (
            jnp.sum(jnp.any(wrong_BL > 0, axis=1).astype(jnp.float32)),
            jnp.sum(jnp.any(weights_BL > 0, axis=1).astype(jnp.float32)),
        ),
    }
    if repeated_BL is not None:
        for name, chosen_BL in (("repeated", repeated_BL), ("other", 1 - repeated_BL)):
            counted_BL = weights_BL * chosen_BL
            measures[f"{name}_loss"] = (jnp.sum(counted_BL * loss_BL), jnp.sum(counted_BL))
    if valid_BLV is None:
        return measures
    probabilities_BLV = jax.nn.softmax(logits_BLV, axis=-1)
    invalid_BL = jnp.sum((1 - valid_BLV) * probabilities_BLV, axis=-1)
    counted_BLV = weights_BL[..., None] * valid_BLV
    # NaN is an error too.
    below_BLV = (~(probabilities_BLV > invalid_BL[..., None])).astype(counted_BLV.dtype)
    return {
        **measures,
        "invalid_error": (jnp.sum(weights_BL * invalid_BL), tokens),
        "valid_error": (jnp.sum(counted_BLV * below_BLV), jnp.sum(counted_BLV)),
    }


def sampled_cross_entropy(
    x_BLD: Array, table_VD: Array, bias_V: Array, targets_BL: Array, key: Array, num_sampled: int
) -> Array:
    """Returns the cross entropy of `table x + bias` over sampled classes: see `sample_classes`.

    With s_k = table_k·x + bias_k − log Q(k), where Q(k) is the expected number of times that k is
    sampled,

        loss = −s_t + log(e^{s_t} + Σ_{k sampled, k ≠ t} e^{s_k}).

    All tokens share one sample. The classes are assumed to be sorted by decreasing frequency. If
    all classes are sampled, Q is 1 and this is the full cross entropy. Jean et al. (arXiv
    1412.2007). The correction by Q is the same as in TensorFlow's `sampled_softmax_loss`.

    Args:
      x_BLD: the input of the softmax.
      table_VD: a row for each class.
      bias_V: the bias of each class.
      targets_BL: int32, the correct classes t.
      key: random key of the sample.
      num_sampled: number of sampled classes; values above V count as V.

    Returns:
      loss_BL in nats, float32 (float64 if x is float64); NaN for a target outside the vocabulary.
    """
    vocab_size = len(table_VD)
    classes_S, arrival = sample_classes(key, min(num_sampled, vocab_size), vocab_size)
    dtype, wide = x_BLD.dtype, accumulator_dtype(x_BLD.dtype)
    bias_V = bias_V.astype(wide)
    shift_S = bias_V[classes_S] - _log_count(classes_S, arrival, vocab_size, wide)
    rows_SD = table_VD[classes_S].astype(dtype)
    drawn_BLS = (
        jnp.einsum("BLD,SD->BLS", x_BLD, rows_SD, preferred_element_type=wide) + shift_S[None, None]
    )
    # Not −∞, because that has no gradient if nothing else is sampled.
    least = jnp.asarray(jnp.finfo(wide).min / 2, wide)
    drawn_BLS = jnp.where(targets_BL[..., None] == classes_S[None, None], least, drawn_BLS)
    rows_BLD = lookup(table_VD, targets_BL).astype(dtype).astype(wide)
    target_BL = jnp.sum(x_BLD.astype(wide) * rows_BLD, axis=-1) + lookup(bias_V, targets_BL)
    target_BL = target_BL - _log_count(targets_BL, arrival, vocab_size, wide)
    return jnp.logaddexp(target_BL, jax.nn.logsumexp(drawn_BLS, axis=-1)) - target_BL


def sample_classes(key: Array, num_sampled: int, vocab_size: int) -> tuple[Array, Array]:
    """Samples classes without replacement; first k with P(k) = log((k+2)/(k+1)) / log(V+1) (Zipf).

    Every class k arrives after a random time, exponentially distributed with rate P(k). The first
    classes to arrive are the sample. The time of the first class that is not sampled gives the
    expected count of each class: see `expected_count`.

    Returns:
      (classes, arrival). `classes` is int32 `[S]`. `arrival` is the time of the first class that is
      not sampled, or ∞ if all classes are sampled.

    >>> classes_S, arrival = sample_classes(jax.random.key(0), 3, 3)
    >>> sorted(classes_S.tolist()), float(arrival)
    ([0, 1, 2], inf)
    """
    rank_V = np.arange(1, vocab_size + 1, dtype=np.float64)
    rates_V = jnp.asarray(np.log1p(1 / rank_V) / np.log1p(vocab_size), jnp.float32)
    times_V = jax.random.exponential(key, (vocab_size,), jnp.float32) / rates_V
    later_V, order_V = jax.lax.top_k(-times_V, min(num_sampled + 1, vocab_size))
    arrival = (
        -later_V[num_sampled] if num_sampled < vocab_size else jnp.asarray(jnp.inf, jnp.float32)
    )
    return order_V[:num_sampled].astype(jnp.int32), arrival


def expected_count(classes: Array, arrival: Array, vocab_size: int) -> Array:
    """Returns Q(k) = 1 − exp(−P(k)·arrival), the probability of k's arrival before time `arrival`.

    For any f, the expected value of Σ f(k)/Q(k) over the sampled classes is Σ f(k) over all
    classes. Duffield et al., "Priority sampling for estimation of arbitrary subset sums" (2007).
    TensorFlow uses the same formula, with the number of draws that its sampler needed instead of
    `arrival`.

    >>> float(expected_count(jnp.array([2]), jnp.array(jnp.inf), 3)[0])
    1.0
    """
    rank = classes.astype(jnp.float32) + 1
    return -jnp.expm1(-jnp.log1p(1 / rank) / np.log1p(vocab_size).astype(np.float32) * arrival)


def _log_count(classes: Array, arrival: Array, vocab_size: int, dtype: jnp.dtype) -> Array:
    return jnp.log(expected_count(classes, arrival, vocab_size)).astype(dtype)
