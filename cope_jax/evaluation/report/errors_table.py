"""What was measured of a run, as a table in the terminal."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table

from cope_jax.tasks import Task


def print_errors(task: Task, records: Sequence[dict[str, Any]]) -> None:
    """Prints what was measured of each seed on the fixed splits: errors in percent, losses in nats."""
    metrics = list(dict.fromkeys(record["metric"] for record in records))
    errors = [metric for metric in metrics if metric.endswith("error")]
    others = [metric for metric in metrics if metric not in errors]
    table = rich.table.Table("seed", "split", *(f"{_words(m)} %" for m in errors), *map(_words, others))
    for seed in dict.fromkeys(record["seed"] for record in records):
        for split in task.evaluation_splits:
            values = {r["metric"]: r["value"] for r in records if r["split"] == split and r["seed"] == seed}
            shares = (f"{100 * values[metric]:.2f}" for metric in errors)
            table.add_row(str(seed), split, *shares, *(f"{values[metric]:.4f}" for metric in others))
    console().print(table)


def console() -> rich.console.Console:
    """A console that is wide where nothing says how wide it is, as in a file, so that no figure is cut off."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return rich.console.Console(width=None if known else 160, highlight=False)


def _words(name: str) -> str:
    return name.replace("_", " ")
