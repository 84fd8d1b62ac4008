"""Trains linear probes on frozen vectors of layers, and compares layers for syntax and meaning.

The accuracy of a probe means little by itself. The baselines are the most frequent label, the most
frequent label of each word, and a control task. The labels of the control task are random, so a
probe can only memorise them.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.corpora.baselines import majority_by_word, majority_label
from cope_jax.evaluation.contextual.linear_probe import DEFAULT, ProbeConfig, fit_probe
from cope_jax.evaluation.report.table import MISSING, Table, share

TAGS, SENSES = "parts of speech", "word senses"
CLAIM = "lower layers know syntax, higher ones meaning"


@dataclasses.dataclass(frozen=True)
class LayerScore:
    """The results of a probe on one layer."""

    layer: str  # its name
    accuracy: float  # on the task, on the test vectors
    control: float  # on the control task

    @property
    def selectivity(self) -> float:
        """Accuracy − control: the accuracy without memorising. Hewitt & Liang (1909.03368)."""
        return self.accuracy - self.control


@dataclasses.dataclass(frozen=True)
class Probing:
    """All results of one embedder on one task."""

    name: str  # name of the embedder
    scores: tuple[LayerScore, ...]  # for each layer, the lowest first
    mix: tuple[float, ...]  # softmax weights of the layers in a probe on all layers
    mix_accuracy: float  # accuracy of this probe on all layers
    # For each layer, the accuracy of a probe on this layer and all lower ones.
    cumulative: tuple[float, ...]
    baselines: dict[str, float]  # name → accuracy, from `baselines`

    @property
    def centre_of_gravity(self) -> float:
        """The mean layer of the mix s, Σ_l l·s_l over layers 0, 1, … (Tenney et al. 1905.05950)."""
        s = np.asarray(self.mix, np.float64)
        return float(np.arange(len(s)) @ s / s.sum())

    @property
    def expected_layer(self) -> float | None:
        """Σ_l l·Δ_l / Σ_l Δ_l, Δ_l = cumulative(l) − cumulative(l−1): where the answer is found.

        The sums start at l = 1, and the lowest layer is l = 0. None if the higher layers do not
        improve on layer 0. Tenney et al. (arXiv 1905.05950).
        """
        gains = np.diff(np.asarray(self.cumulative, np.float64))
        total = gains.sum()
        return float(np.arange(1, len(gains) + 1) @ gains / total) if total > 0 else None


def probe_layers(
    name: str,
    layers: Sequence[str],
    train: tuple[np.ndarray, Sequence[str], Sequence[str]],
    test: tuple[np.ndarray, Sequence[str], Sequence[str]],
    config: ProbeConfig = DEFAULT,
) -> Probing:
    """Trains three probes for each layer: task, control task, and task with all lower layers.

    `train` and `test` are (vectors `[N, J, D]`, words, labels). For word senses, the words are
    lemmas. A test label that is not in training always counts as an error. `name` is the name of
    the embedder, and `layers` are the names of its J layers, the lowest first.
    """
    (x, words, labels), (test_x, test_words, test_labels) = train, test
    names = sorted(set(labels))
    numbers = {label: number for number, label in enumerate(names)}
    y, test_y = (
        np.array([numbers.get(label, -1) for label in column], np.int32)
        for column in (labels, test_labels)
    )
    random, test_random = (
        control_labels(column, labels, seed=config.seed) for column in (words, test_words)
    )
    r, test_r = (
        np.array([numbers[label] for label in column], np.int32) for column in (random, test_random)
    )
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
    """Accuracies of baselines without vectors: the majority label, of all or of each word.

    `train` and `test` are (words, labels). Unknown words get the majority label.

    >>> baselines((["a", "a", "b"], ["X", "X", "Y"]), (["a", "b", "c"], ["X", "Y", "Y"]))
    {'majority': 0.333..., 'majority of the word': 0.666...}
    """
    words, labels = test
    guesses = {"majority": [majority_label(train[1])] * len(labels)}
    guesses["majority of the word"] = majority_by_word(*train, words)
    pairs = {name: zip(guess, labels, strict=True) for name, guess in guesses.items()}
    return {name: float(np.mean([a == b for a, b in both])) for name, both in pairs.items()}


def wilson_interval(accuracy: float, size: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a binomial share p, (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    p is `accuracy`, and n is `size`. The default z gives a 95 % interval. The interval stays within
    [0, 1], and does not shrink to a point if all answers are correct. Wilson 1927.

    >>> [round(end, 4) for end in wilson_interval(0.5, 100)]
    [0.4038, 0.5962]
    """
    middle, below = accuracy + z**2 / (2 * size), 1 + z**2 / size
    half = z * (accuracy * (1 - accuracy) / size + z**2 / (4 * size**2)) ** 0.5
    return (middle - half) / below, (middle + half) / below


def best_layers(probing: Probing, size: int) -> tuple[int, list[int]]:
    """Returns the best layer, and all layers whose intervals overlap with its interval.

    Each of these layers may be the best. Intervals are from `wilson_interval`; `size` is the number
    of test labels.
    """
    ends = [wilson_interval(score.accuracy, size) for score in probing.scores]
    best = int(np.argmax([score.accuracy for score in probing.scores]))
    return best, [layer for layer, (_, high) in enumerate(ends) if high >= ends[best][0]]


def control_labels(words: Sequence[str], labels: Sequence[str], *, seed: int = 0) -> list[str]:
    """Labels of the control task: one for each word, sampled like the real labels.

    The sample is a hash of the word and the seed, so a word has the same label in every text and
    process. `labels` are the real training labels. `words` are from training or from test. Hewitt
    and Liang (arXiv 1909.03368).

    >>> control_labels(["play", "run", "play"], ["NOUN", "VERB"])
    ['NOUN', 'VERB', 'NOUN']
    """
    counts = sorted(Counter(labels).items())
    ends = np.cumsum([count for _, count in counts]) / len(labels)

    def draw(word: str) -> str:
        digest = hashlib.blake2b(f"{seed} {word}".encode(), digest_size=8).digest()
        share = int.from_bytes(digest, "big") / 2**64
        return counts[int(np.searchsorted(ends[:-1], share, side="right"))][0]

    drawn = {word: draw(word) for word in set(words)}
    return [drawn[word] for word in words]


def record(probing: Probing, size: int) -> dict[str, Any]:
    """All results, as fields for JSON."""
    best, candidates = best_layers(probing, size)
    plain = dataclasses.asdict(probing)
    plain["floors"] = plain.pop("baselines")
    for score, layer_score in zip(plain["scores"], probing.scores, strict=True):
        interval = wilson_interval(layer_score.accuracy, size)
        score |= {"interval": interval, "selectivity": layer_score.selectivity}
    layers = [score.layer for score in probing.scores]
    return plain | {
        "best_layer": layers[best],
        "candidates": [layers[layer] for layer in candidates],
        "centre_of_gravity": probing.centre_of_gravity,
        "expected_layer": probing.expected_layer,
    }


def table(probing: Probing, size: int, title: str) -> Table:
    """Makes a table with a row for each baseline and layer.

    The columns are accuracy with interval, accuracy on the control task, selectivity, and share of
    the mix.
    """
    floors = probing.baselines.items()
    rows = [[f"none: {name}", share(value), *[MISSING] * 3] for name, value in floors]
    for score, weight in zip(probing.scores, probing.mix, strict=True):
        accuracy = share(score.accuracy, wilson_interval(score.accuracy, size))
        rows.append(
            [score.layer, accuracy, share(score.control), share(score.selectivity), share(weight)]
        )
    return Table(title, ("layer", "accuracy", "control", "selectivity", "mix"), rows)


def mix_summary(probing: Probing) -> str:
    """Describes the probe over all layers: its accuracy, centre of gravity and expected layer."""
    expected = "no layer improves on the lowest"
    if probing.expected_layer is not None:
        expected = f"expected layer {probing.expected_layer:.2f}"
    mixed = f"Mix of all layers {share(probing.mix_accuracy)} %"
    return f"{mixed}, centre of gravity {probing.centre_of_gravity:.2f}, {expected}"


def paragraph(probings: Mapping[str, Mapping[str, Probing]], sizes: Mapping[str, int]) -> str:
    """Writes a paragraph that compares `CLAIM` with the results.

    `probings` maps the name of an embedder, and then a task, to the results. `sizes` maps a task to
    its number of test labels.
    """
    parts = [f"Claimed: {CLAIM} (Peters et al. 2018; Tenney et al. 2019). Seen:"]
    for name, by_task in probings.items():
        seen = {task: best_layers(probing, sizes[task]) for task, probing in by_task.items()}
        findings = ", ".join(
            _finding(task, probing, sizes[task], *seen[task]) for task, probing in by_task.items()
        )
        centres = {task: probing.centre_of_gravity for task, probing in by_task.items()}
        parts.append(
            f"In {name} (layers 0 to {len(by_task[TAGS].scores) - 1}) {findings}; the mixes have their centres at"
            f" {centres[TAGS]:.2f} and {centres[SENSES]:.2f}. {_verdict(seen)}."
        )
    first = next(iter(probings.values()))
    floors = {task: probing.baselines["majority of the word"] for task, probing in first.items()}
    words = " and ".join(f"{100 * value:.1f} % of {task}" for task, value in floors.items())
    parts.append(
        f"Each word's most frequent label is already right for {words}. The control task of {SENSES} has few words,"
        " which a probe can memorise: only the selectivity of parts of speech is meaningful."
    )
    return " ".join(parts)


def _finding(task: str, probing: Probing, size: int, best: int, candidates: Sequence[int]) -> str:
    score = probing.scores[best].accuracy
    low, high = wilson_interval(score, size)
    overlapping = [f"layer {layer}" for layer in candidates if layer != best]
    near = f"overlapping with {', '.join(overlapping) or 'no other'}"
    interval = f"interval {100 * low:.1f} to {100 * high:.1f}"
    return f"{task} are best in layer {best} ({100 * score:.1f} %, {interval}, {near})"


def _verdict(seen: Mapping[str, tuple[int, list[int]]]) -> str:
    (syntax, low), (meaning, high) = seen[TAGS], seen[SENSES]
    if max(low) < min(high):
        return "This is as claimed"
    if min(low) > max(high):
        return "This is the opposite of the claim"
    if low == high == [syntax]:
        return "Both are best in the same layer, which the claim does not foresee"
    order = "in the claimed order" if syntax < meaning else "in the opposite order"
    best = f"The best layers are {order}" if syntax != meaning else "One layer is best for both"
    return f"{best}, but the sets of layers that may be best overlap, so the result is inconclusive"
