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
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.linear_probe import DEFAULT, ProbeConfig, fit_probe


@dataclasses.dataclass(frozen=True)
class LayerScore:
    """What a probe found in one layer.

    Attributes:
      layer: its name.
      accuracy: of the task, on the test vectors.
      control: the same of the control task; None where it was not asked for.
    """

    layer: str
    accuracy: float
    control: float | None = None

    @property
    def selectivity(self) -> float | None:
        """Accuracy − control: what is not the probe's own memory. Hewitt and Liang (arXiv 1909.03368)."""
        return None if self.control is None else self.accuracy - self.control


@dataclasses.dataclass(frozen=True)
class Probing:
    """All that was measured of one embedder on one task.

    Attributes:
      name: of the embedder.
      scores: for each layer, the lowest first.
      mix: softmax weights of the layers in a probe on all of them.
      mix_accuracy: of that probe.
      cumulative: accuracies of probes on the layers up to each.
      baselines: name → accuracy, from `baselines`.
    """

    name: str
    scores: tuple[LayerScore, ...]
    mix: tuple[float, ...]
    mix_accuracy: float
    cumulative: tuple[float, ...]
    baselines: dict[str, float]

    @property
    def centre_of_gravity(self) -> float:
        """See `centre_of_gravity`."""
        return centre_of_gravity(self.mix)

    @property
    def expected_layer(self) -> float | None:
        """See `expected_layer`; None where no layer adds to the lowest."""
        try:
            return expected_layer(self.cumulative)
        except ConfigError:
            return None


def probe_layers(
    name: str,
    layers: Sequence[str],
    train: tuple[np.ndarray, Sequence[str], Sequence[str]],
    test: tuple[np.ndarray, Sequence[str], Sequence[str]],
    config: ProbeConfig = DEFAULT,
    *,
    control: bool = True,
) -> Probing:
    """Probes every layer, the control task, and the mixes of the layers up to each.

    Args:
      name: of the embedder.
      layers: names of its J layers.
      train: vectors `[N, J, D]`, words and labels. For word senses the words are the lemmas.
      test: the same of the test data; a label that training does not have is always wrong.
      config: how each probe is trained.
      control: whether to train on the control task too.
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
        memory = fit_probe(x_N1D, r, len(names), config).accuracy(test_N1D, test_r) if control else None
        scores.append(LayerScore(layer, accuracy, memory))
    cumulative = [scores[0].accuracy]
    mix: tuple[float, ...] = (1.0,)
    for stop in range(2, len(layers) + 1):
        probe = fit_probe(x[:, :stop], y, len(names), config)
        cumulative.append(probe.accuracy(test_x[:, :stop], test_y))
        mix = tuple(map(float, probe.mix_J))
    return Probing(
        name,
        tuple(scores),
        mix,
        cumulative[-1],
        tuple(cumulative),
        baselines((words, labels), (test_words, test_labels)),
    )


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

    A hash of the word makes the draw, so it is the same in every text and process, also for words that training never
    saw. Hewitt and Liang (arXiv 1909.03368).

    Args:
      words: those to label.
      labels: the real labels of the training data.
      seed: another seed draws other labels.

    >>> control_labels(["play", "run", "play"], ["NOUN", "VERB"])
    ['NOUN', 'VERB', 'NOUN']
    """
    counts = sorted(Counter(labels).items())
    ends = np.cumsum([count for _, count in counts]) / len(labels)
    drawn = {
        word: counts[int(np.searchsorted(ends[:-1], _uniform(word, seed), side="right"))][0] for word in set(words)
    }
    return [drawn[word] for word in words]


def _uniform(word: str, seed: int) -> float:
    digest = hashlib.blake2b(f"{seed} {word}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def centre_of_gravity(weights: Sequence[float]) -> float:
    """Σ_l l·s_l over the layers l = 0, 1, …, with weights s of sum 1. Tenney et al. (arXiv 1905.05950).

    >>> centre_of_gravity([0.25, 0.25, 0.5])
    1.25
    """
    s = np.asarray(weights, np.float64)
    if s.ndim != 1 or not s.size or (s < 0).any() or abs(s.sum() - 1) > 1e-4:
        raise ConfigError(f"mix weights must be positive with sum 1, got {list(weights)}: take their softmax")
    return float(np.arange(len(s)) @ s / s.sum())


def expected_layer(scores: Sequence[float]) -> float:
    """Σ_l l·Δ_l / Σ_l Δ_l, Δ_l = score(l) − score(l−1): the layer at which the answer is found.

    Layer l = 0 is the lowest, whose score is where the differences start. Tenney et al. (arXiv 1905.05950).

    Args:
      scores: of probes on the layers up to each.

    >>> expected_layer([0.5, 0.75, 0.875])
    1.333...
    """
    gains = np.diff(np.asarray(scores, np.float64))
    if not gains.size or gains.sum() <= 0:
        raise ConfigError(f"the expected layer needs upper layers that add to the lowest, got scores {list(scores)}")
    return float(np.arange(1, len(gains) + 1) @ gains / gains.sum())
