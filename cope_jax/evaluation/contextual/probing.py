"""What each layer knows: linear probes on frozen vectors, and what their figures must be compared with.

The accuracy of a probe says little by itself: the baselines are the majority, each word's own
majority, and a control task of random labels, which only memory can solve.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from cope_jax.corpora.baselines import majority_by_word, majority_label
from cope_jax.evaluation.contextual.linear_probe import DEFAULT, ProbeConfig, fit_probe


@dataclasses.dataclass(frozen=True)
class LayerScore:
    """What a probe found in one layer."""

    layer: str  # its name
    accuracy: float  # of the task, on the test vectors
    control: float  # the same of the control task

    @property
    def selectivity(self) -> float:
        """Accuracy − control: what is not the probe's own memory. Hewitt and Liang (arXiv 1909.03368)."""
        return self.accuracy - self.control


@dataclasses.dataclass(frozen=True)
class Probing:
    """All that was measured of one embedder on one task."""

    name: str  # of the embedder
    scores: tuple[LayerScore, ...]  # for each layer, the lowest first
    mix: tuple[float, ...]  # softmax weights of the layers in a probe on all of them
    mix_accuracy: float  # of that probe
    cumulative: tuple[float, ...]  # accuracies of probes on the layers up to each
    baselines: dict[str, float]  # name → accuracy, from `baselines`

    @property
    def centre_of_gravity(self) -> float:
        """Σ_l l·s_l over the layers l = 0, 1, …, s being the `mix`. Tenney et al. (arXiv 1905.05950)."""
        s = np.asarray(self.mix, np.float64)
        return float(np.arange(len(s)) @ s / s.sum())

    @property
    def expected_layer(self) -> float | None:
        """Σ_l l·Δ_l / Σ_l Δ_l, Δ_l = score(l) − score(l−1) of `cumulative`: the layer at which the answer is found.

        Layer l = 0 is the lowest, whose score is where the differences start. None where no layer adds to it. Tenney et
        al. (arXiv 1905.05950).
        """
        gains = np.diff(np.asarray(self.cumulative, np.float64))
        return float(np.arange(1, len(gains) + 1) @ gains / gains.sum()) if gains.sum() > 0 else None


def probe_layers(
    name: str,
    layers: Sequence[str],
    train: tuple[np.ndarray, Sequence[str], Sequence[str]],
    test: tuple[np.ndarray, Sequence[str], Sequence[str]],
    config: ProbeConfig = DEFAULT,
) -> Probing:
    """Probes every layer, the control task, and the mixes of the layers up to each.

    The data to train and to test on are vectors `[N, J, D]`, words and labels; for word senses the words are lemmas. A
    label that training does not have is always wrong in the test.
    """
    (x, words, labels), (test_x, test_words, test_labels) = train, test
    names = sorted(set(labels))
    numbers = {label: number for number, label in enumerate(names)}
    y, test_y = (np.array([numbers.get(label, -1) for label in own], np.int32) for own in (labels, test_labels))
    random, test_random = (control_labels(own, labels, seed=config.seed) for own in (words, test_words))
    r, test_r = (np.array([numbers[label] for label in own], np.int32) for own in (random, test_random))
    scores = []
    for j, layer in enumerate(layers):
        x_N1D, test_N1D = x[:, j : j + 1], test_x[:, j : j + 1]
        accuracy = fit_probe(x_N1D, y, len(names), config).accuracy(test_N1D, test_y)
        memory = fit_probe(x_N1D, r, len(names), config).accuracy(test_N1D, test_r)
        scores.append(LayerScore(layer, accuracy, memory))
    cumulative = [scores[0].accuracy]
    mix: tuple[float, ...] = (1.0,)
    for stop in range(2, len(layers) + 1):
        probe = fit_probe(x[:, :stop], y, len(names), config)
        cumulative.append(probe.accuracy(test_x[:, :stop], test_y))
        mix = tuple(map(float, probe.mix_J))
    floors = baselines((words, labels), (test_words, test_labels))
    return Probing(name, tuple(scores), mix, cumulative[-1], tuple(cumulative), floors)


def baselines(
    train: tuple[Sequence[str], Sequence[str]], test: tuple[Sequence[str], Sequence[str]]
) -> dict[str, float]:
    """Accuracies that need no vectors: the majority label, and each word's own (the majority for unknown words).

    >>> baselines((["a", "a", "b"], ["X", "X", "Y"]), (["a", "b", "c"], ["X", "Y", "Y"]))
    {'majority': 0.333..., 'majority of the word': 0.666...}
    """
    words, labels = test
    guesses = {"majority": [majority_label(train[1])] * len(labels)}
    guesses["majority of the word"] = majority_by_word(*train, words)
    return {
        name: float(np.mean([a == b for a, b in zip(guess, labels, strict=True)])) for name, guess in guesses.items()
    }


def wilson_interval(share: float, size: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a binomial share: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    It stays within [0, 1], and does not shrink to a point where all are right. Wilson 1927.

    >>> [round(end, 4) for end in wilson_interval(0.5, 100)]
    [0.4038, 0.5962]
    """
    middle, below = share + z**2 / (2 * size), 1 + z**2 / size
    half = z * (share * (1 - share) / size + z**2 / (4 * size**2)) ** 0.5
    return (middle - half) / below, (middle + half) / below


def best_layers(probing: Probing, size: int) -> tuple[int, list[int]]:
    """The best layer, and all whose intervals overlap with its own: those that might be the best."""
    ends = [wilson_interval(score.accuracy, size) for score in probing.scores]
    best = int(np.argmax([score.accuracy for score in probing.scores]))
    return best, [layer for layer, (_, high) in enumerate(ends) if high >= ends[best][0]]


def control_labels(words: Sequence[str], labels: Sequence[str], *, seed: int = 0) -> list[str]:
    """Labels of the control task: each word has one label, drawn with the frequencies of the real ones.

    A hash of the word and the seed makes the draw, so it is the same in every text and process, also for words that
    training, whose real labels these are, never saw. Hewitt and Liang (arXiv 1909.03368).

    >>> control_labels(["play", "run", "play"], ["NOUN", "VERB"])
    ['NOUN', 'VERB', 'NOUN']
    """
    counts = sorted(Counter(labels).items())
    ends = np.cumsum([count for _, count in counts]) / len(labels)

    def draw(word: str) -> str:
        digest = hashlib.blake2b(f"{seed} {word}".encode(), digest_size=8).digest()
        return counts[int(np.searchsorted(ends[:-1], int.from_bytes(digest, "big") / 2**64, side="right"))][0]

    drawn = {word: draw(word) for word in set(words)}
    return [drawn[word] for word in words]
