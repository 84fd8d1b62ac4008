"""Scores of classifiers over folds as tables."""

import dataclasses
from collections.abc import Mapping

from rich.table import Table

from cope_jax.evaluation.contextual.classification import CrossValidation, Metrics

Summary = dict[str, dict[str, float]]
"""By metric: its `mean` over the folds with the interval `low` to `high`, and its value `pooled` over all texts."""

PER_CENT = ("accuracy", "spam_caught", "blocked_ham")
HEADINGS = {
    "accuracy": "accuracy %",
    "mcc": "MCC",
    "f1": "F1",
    "spam_caught": "spam caught %",
    "blocked_ham": "ham blocked %",
}


def summary(run: CrossValidation) -> Summary:
    """What is to be known of one classifier; see `CrossValidation.mean_interval`."""
    found = {}
    for field in dataclasses.fields(Metrics):
        mean, low, high = run.mean_interval(field.name)  # type: ignore[arg-type]  # the fields are the metrics
        found[field.name] = {"mean": mean, "low": low, "high": high, "pooled": getattr(run.pooled(), field.name)}
    return found


def rich_table(summaries: Mapping[str, Summary]) -> Table:
    """The table for a terminal: means over the folds, with intervals."""
    table = Table("system", *HEADINGS.values(), title="means over folds [95 % interval]")
    for name, metrics in summaries.items():
        table.add_row(name, *(_cell(metric, metrics[metric]) for metric in HEADINGS))
    return table


def markdown(summaries: Mapping[str, Summary]) -> str:
    """The table for a document.

    >>> value = {"mean": 0.5, "low": 0.25, "high": 1.2, "pooled": 0.5}
    >>> print(markdown({"SVM": dict.fromkeys(HEADINGS, value)}).splitlines()[-1][:55])
    | SVM | 50.00 [25.00, 100.00] | 0.500 [0.250, 1.000] |
    """
    lines = [f"| system | {' | '.join(HEADINGS.values())} |", f"| --- |{' ---: |' * len(HEADINGS)}"]
    for name, metrics in summaries.items():
        lines.append(f"| {name} | {' | '.join(_cell(metric, metrics[metric]) for metric in HEADINGS)} |")
    return "\n".join(lines) + "\n"


def _cell(metric: str, value: Mapping[str, float]) -> str:
    scale, digits = (100, 2) if metric in PER_CENT else (1, 3)
    # A symmetric interval may reach beyond what the metric can be.
    bounded = value["mean"], max(value["low"], -1.0 if metric == "mcc" else 0.0), min(value["high"], 1.0)
    mean, low, high = (f"{scale * number:.{digits}f}" for number in bounded)
    return f"{mean} [{low}, {high}]"
