"""Tables of accuracies: systems downwards, splits to the right, mean ± sample standard deviation over seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

Scores = Mapping[str, Mapping[str, Sequence[float]]]
"""Shares in [0, 1] of every seed, by system and by split."""


def by_split(
    records: Iterable[Mapping[str, Any]], system: str, metric: str, *, of_error: bool
) -> dict[str, list[float]]:
    """The values of a metric in a command's records, by split; 1 − value where it is an error.

    >>> record = {"system": "words", "split": "test", "metric": "token_error", "value": 0.25}
    >>> by_split([record], "words", "token_error", of_error=True)
    {'test': [0.75]}
    """
    found: dict[str, list[float]] = {}
    for record in records:
        if record.get("system") == system and record["metric"] == metric:
            found.setdefault(record["split"], []).append(1 - record["value"] if of_error else record["value"])
    return found


def rich_table(scores: Scores, title: str) -> Table:
    """The table for a terminal."""
    splits = _splits(scores)
    table = Table("system", *splits, title=title)
    for name, values in scores.items():
        table.add_row(name, *(percent(values.get(split, ())) for split in splits))
    return table


def markdown(scores: Scores, title: str) -> str:
    """The table for a document.

    >>> print(markdown({"words": {"test": [0.5, 0.6]}, "floor": {"test": [0.25]}}, "right, in %"))
    right, in %
    <BLANKLINE>
    | system | test |
    | --- | ---: |
    | words | 55.00 ± 7.07 |
    | floor | 25.00 |
    <BLANKLINE>
    """
    splits = _splits(scores)
    lines = [title, "", f"| system | {' | '.join(splits)} |", f"| --- |{' ---: |' * len(splits)}"]
    for name, values in scores.items():
        lines.append(f"| {name} | {' | '.join(percent(values.get(split, ())) for split in splits)} |")
    return "\n".join(lines) + "\n"


def percent(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation, in per cent.

    >>> percent([0.5, 0.6]), percent([0.25]), percent([])
    ('55.00 ± 7.07', '25.00', '–')
    """
    shares = [100 * value for value in values if not math.isnan(value)]
    if not shares:
        return "–"
    spread = f" ± {statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{statistics.mean(shares):.2f}{spread}"


def _splits(scores: Scores) -> list[str]:
    return list(dict.fromkeys(split for values in scores.values() for split in values))
