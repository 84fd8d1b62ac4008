"""What probes of layers say of "lower layers know syntax, higher ones meaning"."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.evaluation.contextual.probing import Probing

TAGS, SENSES = "parts of speech", "word senses"
CLAIM = "lower layers know syntax, higher ones meaning"


def interval(share: float, size: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a binomial share: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    It stays within [0, 1], and does not shrink to a point where all are right. Wilson 1927.

    >>> [round(end, 4) for end in interval(0.5, 100)]
    [0.4038, 0.5962]
    """
    middle, below = share + z**2 / (2 * size), 1 + z**2 / size
    half = z * (share * (1 - share) / size + z**2 / (4 * size**2)) ** 0.5
    return (middle - half) / below, (middle + half) / below


def best_layers(probing: Probing, size: int) -> tuple[int, list[int]]:
    """The best layer, and all whose intervals overlap with its own: those that might be the best."""
    ends = [interval(score.accuracy, size) for score in probing.scores]
    best = int(np.argmax([score.accuracy for score in probing.scores]))
    return best, [layer for layer, (_, high) in enumerate(ends) if high >= ends[best][0]]


def record(probing: Probing, size: int) -> dict[str, Any]:
    """All that was measured, as JSON has it."""
    best, candidates = best_layers(probing, size)
    plain = dataclasses.asdict(probing)
    for score, own in zip(plain["scores"], probing.scores, strict=True):
        score |= {"interval": interval(own.accuracy, size), "selectivity": own.selectivity}
    layers = [score.layer for score in probing.scores]
    return plain | {
        "best_layer": layers[best],
        "candidates": [layers[layer] for layer in candidates],
        "centre_of_gravity": probing.centre_of_gravity,
        "expected_layer": probing.expected_layer,
    }


def paragraph(found: Mapping[str, Mapping[str, Probing]], sizes: Mapping[str, int]) -> str:
    """What is claimed against what is seen, in words made from the numbers."""
    parts = [f"Claimed: {CLAIM} (Peters et al. 2018; Tenney et al. 2019). Seen:"]
    for name, by_task in found.items():
        seen = {task: best_layers(own, sizes[task]) for task, own in by_task.items()}
        told = ", ".join(_told(task, own, sizes[task], *seen[task]) for task, own in by_task.items())
        centres = {task: own.centre_of_gravity for task, own in by_task.items()}
        parts.append(
            f"In {name} (layers 0 to {len(by_task[TAGS].scores) - 1}) {told}; the mixes have their centres at"
            f" {centres[TAGS]:.2f} and {centres[SENSES]:.2f}. {_verdict(seen)}."
        )
    floors = {task: own.floors["majority of the word"] for task, own in next(iter(found.values())).items()}
    words = " and ".join(f"{100 * value:.1f} % of {task}" for task, value in floors.items())
    parts.append(
        f"Each word's own majority already has {words} right. The control task of {SENSES} is of few words, which"
        " memory alone can tell apart: only the selectivity of parts of speech means something."
    )
    return " ".join(parts)


def _told(task: str, probing: Probing, size: int, best: int, candidates: Sequence[int]) -> str:
    score = probing.scores[best].accuracy
    low, high = interval(score, size)
    others = [str(layer) for layer in candidates if layer != best]
    near = f"with which overlap those of {', '.join(others)}" if others else "with which no other overlaps"
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
