"""What probes of layers say of "lower layers know syntax, higher ones meaning"."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cope_jax.evaluation.contextual.probing import Probing, best_layers, wilson_interval
from cope_jax.evaluation.report.table import MISSING, Table, share

TAGS, SENSES = "parts of speech", "word senses"
CLAIM = "lower layers know syntax, higher ones meaning"


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
