"""What each layer knows: linear probes on frozen vectors, and what they say of syntax and meaning.

The accuracy of a probe says little by itself: the baselines are the majority, each word's own
majority, and a control task of random labels, which only memory can solve.
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


def wilson_interval(accuracy: float, size: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a binomial share: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    It stays within [0, 1], and does not shrink to a point where all are right. Wilson 1927.

    >>> [round(end, 4) for end in wilson_interval(0.5, 100)]
    [0.4038, 0.5962]
    """
    middle, below = accuracy + z**2 / (2 * size), 1 + z**2 / size
    half = z * (accuracy * (1 - accuracy) / size + z**2 / (4 * size**2)) ** 0.5
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


def record(probing: Probing, size: int) -> dict[str, Any]:
    """All that was measured, as JSON has it."""
    best, candidates = best_layers(probing, size)
    plain = dataclasses.asdict(probing)
    plain["floors"] = plain.pop("baselines")
    for score, own in zip(plain["scores"], probing.scores, strict=True):
        score |= {"interval": wilson_interval(own.accuracy, size), "selectivity": own.selectivity}
    layers = [score.layer for score in probing.scores]
    return plain | {
        "best_layer": layers[best],
        "candidates": [layers[layer] for layer in candidates],
        "centre_of_gravity": probing.centre_of_gravity,
        "expected_layer": probing.expected_layer,
    }


def table(probing: Probing, size: int, title: str) -> Table:
    """A row for each baseline and layer: accuracy with its interval, control task, selectivity, share of the mix."""
    rows = [[f"none: {name}", share(value), *[MISSING] * 3] for name, value in probing.baselines.items()]
    for score, weight in zip(probing.scores, probing.mix, strict=True):
        accuracy = share(score.accuracy, wilson_interval(score.accuracy, size))
        rows.append([score.layer, accuracy, share(score.control), share(score.selectivity), share(weight)])
    return Table(title, ("layer", "accuracy", "control", "selectivity", "mix"), rows)


def mix_summary(probing: Probing) -> str:
    """What a probe on all layers reaches, and in which layer the answer is found."""
    expected = "no layer mixed in adds to the lowest alone"
    if probing.expected_layer is not None:
        expected = f"expected layer {probing.expected_layer:.2f}"
    mixed = f"All layers mixed {share(probing.mix_accuracy)} %"
    return f"{mixed}, centre of gravity {probing.centre_of_gravity:.2f}, {expected}"


def paragraph(found: Mapping[str, Mapping[str, Probing]], sizes: Mapping[str, int]) -> str:
    """What is claimed against what is seen, in words made from the numbers."""
    parts = [f"Claimed: {CLAIM} (Peters et al. 2018; Tenney et al. 2019). Seen:"]
    for name, by_task in found.items():
        seen = {task: best_layers(own, sizes[task]) for task, own in by_task.items()}
        findings = ", ".join(_finding(task, own, sizes[task], *seen[task]) for task, own in by_task.items())
        centres = {task: own.centre_of_gravity for task, own in by_task.items()}
        parts.append(
            f"In {name} (layers 0 to {len(by_task[TAGS].scores) - 1}) {findings}; the mixes have their centres at"
            f" {centres[TAGS]:.2f} and {centres[SENSES]:.2f}. {_verdict(seen)}."
        )
    floors = {task: own.baselines["majority of the word"] for task, own in next(iter(found.values())).items()}
    words = " and ".join(f"{100 * value:.1f} % of {task}" for task, value in floors.items())
    parts.append(
        f"Each word's own majority already has {words} right. The control task of {SENSES} is of few words, which"
        " memory alone can tell apart: only the selectivity of parts of speech means something."
    )
    return " ".join(parts)


def _finding(task: str, probing: Probing, size: int, best: int, candidates: Sequence[int]) -> str:
    score = probing.scores[best].accuracy
    low, high = wilson_interval(score, size)
    overlapping = [str(layer) for layer in candidates if layer != best]
    near = f"with which overlap those of {', '.join(overlapping)}" if overlapping else "with which no other overlaps"
    return (
        f"{task} are best in layer {best} ({100 * score:.1f} %, interval {100 * low:.1f} to {100 * high:.1f}, {near})"
    )


def _verdict(seen: Mapping[str, tuple[int, list[int]]]) -> str:
    (syntax, low), (meaning, high) = seen[TAGS], seen[SENSES]
    if max(low) < min(high):
        return "This is as claimed"
    if min(low) > max(high):
        return "This is the opposite of what is claimed"
    if low == high == [syntax]:
        return "Both are in one layer, which the claim does not foresee"
    order = "in the order that is claimed" if syntax < meaning else "in the opposite order"
    best = f"The best layers are {order}" if syntax != meaning else "One layer is best for both"
    return f"{best}, but the layers that may be best for either overlap, so that nothing is decided"
