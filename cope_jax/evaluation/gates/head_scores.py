"""Ranks heads by how well a feature of a token predicts that the gates of this token are open.

The mean gate of a key is the mean over the queries that see the key. The AUC of a feature is the
probability that a key with the feature has a wider mean gate than a key without the feature. Ties
count half (Mann–Whitney statistic). The AUC is 1/2 if the gates are independent of the feature.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.models.model import StaticGraphDef

BLOCK = 32
"""Number of neighbouring tokens that are resampled together, because they are not independent."""


@dataclasses.dataclass(frozen=True)
class HeadScore:
    """The scores of one head: which feature of tokens its gates follow, and how closely."""

    layer: int  # from 0
    head: int  # from 0
    # AUC of each feature; NaN if all tokens have the feature, or no token has it.
    aucs: dict[str, float]
    best: str  # the feature of the highest AUC; "" if no feature has an AUC
    # 95 % interval of the AUC of `best`, by a bootstrap of blocks of tokens.
    interval: tuple[float, float]
    mean_with: float  # the mean gate of the keys that have the best feature
    mean_without: float  # the mean gate of the other keys
    # The share of the gates' variance that the token itself explains: adjusted R² of a mean for
    # each token; 0 if the token explains nothing, NaN if no token occurs twice or all gates are
    # equal.
    identity: float


def mean_gates(model: Any, tokens_BL: np.ndarray) -> np.ndarray:
    """The mean gate of each key over the queries that see it, float64 `[layers, H, B, L]`.

    Raises ConfigError if the encoding of the model has no gates.
    """
    graph, state = nnx.split(model)
    rows = [_means(StaticGraphDef(graph), state, row_L[None]) for row_L in tokens_BL]
    return np.stack([np.asarray(row, np.float64) for row in rows], axis=2)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _means(graphdef: StaticGraphDef, state: Any, tokens_1L: Array) -> Array:
    model = nnx.merge(graphdef.graph, state)
    maps = model.maps(tokens_1L)
    if "gates" not in maps:
        raise ConfigError("the encoding of this model has no gates: give a model with cope")
    gates_NHLM = maps["gates"][:, 0].astype(jnp.float32)
    length = tokens_1L.shape[1]
    full = model.config.full_layers or ()
    window = model.config.block.window or length
    sees = [length if layer in full else window for layer in range(len(gates_NHLM))]
    seen_N1LM = jnp.stack([_band(length, size) for size in sees])[:, None]
    return jnp.where(seen_N1LM, gates_NHLM, 0.0).sum(-2) / seen_N1LM.sum(-2).astype(jnp.float32)


def _band(length: int, size: int) -> np.ndarray:
    """True at [i, j] if token i sees token j, one of the last `size` up to it."""
    return np.tri(length, dtype=bool) & ~np.tri(length, k=-size, dtype=bool)


def auc(gates_N: np.ndarray, has_N: np.ndarray) -> float:
    """The AUC, the probability that a gate with the feature exceeds a gate without the feature.

    `has_N` says which gates have the feature. Ties count half. NaN if all gates have the feature,
    or no gate has it.

    >>> auc(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]))
    0.875
    """
    return float(_aucs(gates_N, has_N, np.ones((1, len(gates_N))))[0])


def bootstrap(
    gates_N: np.ndarray, has_N: np.ndarray, rng: np.random.Generator, draws: int = 200
) -> tuple[float, float]:
    """The 95 % interval of an AUC, from `draws` samples of blocks of `BLOCK` tokens.

    Both ends are NaN if no sample has both kinds of tokens, with and without the feature.
    """
    blocks_N = np.arange(len(gates_N)) // BLOCK
    count = int(blocks_N[-1]) + 1
    times_SN = rng.multinomial(count, np.full(count, 1 / count), size=draws)[:, blocks_N]
    found_S = _aucs(gates_N, has_N, times_SN.astype(np.float64))
    found_S = found_S[np.isfinite(found_S)]
    low, high = np.quantile(found_S, (0.025, 0.975)) if len(found_S) else (np.nan, np.nan)
    return float(low), float(high)


def chance(
    gates_HN: np.ndarray, has: Mapping[str, np.ndarray], rng: np.random.Generator, draws: int = 200
) -> float:
    """The 5 % significance threshold of the highest AUC over all heads and features.

    A sample of the null hypothesis shifts the features cyclically against the gates by a random
    number of tokens. So gates still depend on neighbouring gates, and features on neighbouring
    features. The threshold is for the highest AUC of all heads and features. Raises
    ConfigError if no feature distinguishes tokens.
    """
    from scipy.stats import rankdata

    ranks_HN = rankdata(gates_HN, axis=1)
    mixed = [row for row in has.values() if 0 < row.sum() < len(row)]
    if not mixed:
        raise ConfigError("no feature separates the tokens of this text: give a longer text")
    has_FN = np.stack(mixed).astype(np.float64)
    with_F, number = has_FN.sum(axis=1), has_FN.shape[1]
    best_S = np.empty(draws)
    for draw in range(draws):
        sums_HF = ranks_HN @ np.roll(has_FN, int(rng.integers(number)), axis=1).T
        best_S[draw] = ((sums_HF - with_F * (with_F + 1) / 2) / (with_F * (number - with_F))).max()
    return float(np.quantile(best_S, 0.95))


def identity(gates_N: np.ndarray, tokens_N: np.ndarray) -> float:
    """The share of the gates' variance that tokens explain; NaN without repetition or variance.

    The share is 1 − (SS_within/(n−k)) / (SS_total/(n−1)) for n gates of k different tokens.

    >>> identity(np.array([0.0, 0.0, 1.0, 1.0]), np.array([7, 7, 8, 8]))
    1.0
    """
    _, kind_N = np.unique(tokens_N, return_inverse=True)
    number, kinds = len(gates_N), int(kind_N.max()) + 1
    total = float(((gates_N - gates_N.mean()) ** 2).sum())
    if kinds == number or total == 0:
        return float("nan")
    means_K = np.bincount(kind_N, gates_N) / np.bincount(kind_N)
    within = float(((gates_N - means_K[kind_N]) ** 2).sum())
    return 1 - (within / (number - kinds)) / (total / (number - 1))


def rank(
    gates_LHN: np.ndarray,
    has: Mapping[str, np.ndarray],
    tokens_N: np.ndarray,
    rng: np.random.Generator,
) -> list[HeadScore]:
    """Scores all heads, and sorts them by the AUC of their best feature, the highest first.

    `gates_LHN` has the gate of each key, `[layers, H, N]`, in the order of the text. `has` maps
    each feature to bool `[N]`, which is True for keys with the feature. `tokens_N` has the number
    of each key's token.
    """
    heads = []
    for layer, gates_HN in enumerate(gates_LHN):
        for head, gates_N in enumerate(gates_HN):
            aucs = {name: auc(gates_N, has_N) for name, has_N in has.items()}
            defined = {name: value for name, value in aucs.items() if np.isfinite(value)}
            best = max(defined, key=defined.__getitem__, default="")
            mean_with = mean_without = low = high = float("nan")
            if best:
                mean_with = float(gates_N[has[best]].mean())
                mean_without = float(gates_N[~has[best]].mean())
                low, high = bootstrap(gates_N, has[best], rng)
            share = identity(gates_N, tokens_N)
            scores = (aucs, best, (low, high), mean_with, mean_without, share)
            heads.append(HeadScore(layer, head, *scores))
    return sorted(heads, key=lambda score: -score.aucs.get(score.best, 0.0))


def top_tokens(
    gates_N: np.ndarray, words: Sequence[str], count: int = 5, least: int = 3
) -> list[tuple[str, float]]:
    """Returns (text, mean gate) of the `count` tokens with the widest mean gates, the widest first.

    Tokens that occur fewer than `least` times are left out.

    >>> top_tokens(np.array([0.5, 1.0, 0.0, 1.0]), ["a", "b", "a", "b"], least=2)
    [('b', 1.0), ('a', 0.25)]
    """
    places: dict[str, list[float]] = {}
    for word, gate in zip(words, gates_N, strict=True):
        places.setdefault(word, []).append(float(gate))
    means = [(word, float(np.mean(gates))) for word, gates in places.items() if len(gates) >= least]
    return sorted(means, key=lambda pair: -pair[1])[:count]


def _aucs(values_N: np.ndarray, has_N: np.ndarray, times_SN: np.ndarray) -> np.ndarray:
    """The AUCs `[S]` of S samples; `times_SN` says how many times each sample counts each token."""
    order_N = np.argsort(values_N, kind="stable")
    starts_K = np.unique(values_N[order_N], return_index=True)[1]
    times_SN = times_SN[:, order_N]
    with_SK = np.add.reduceat(times_SN * has_N[order_N], starts_K, axis=1)
    without_SK = np.add.reduceat(times_SN * ~has_N[order_N], starts_K, axis=1)
    below_SK = np.cumsum(without_SK, axis=1) - without_SK / 2
    pairs_S = with_SK.sum(axis=1) * without_SK.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(pairs_S > 0, (with_SK * below_SK).sum(axis=1) / pairs_S, np.nan)
