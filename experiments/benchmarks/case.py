"""Contenders that do the same work, and the records of their times."""

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from cope_jax.errors import ConfigError
from cope_jax.runs.records import Record
from experiments.benchmarks.timing import Task, interleave, ratio

Build = Callable[[], Mapping[str, Task]]
"""Makes a contender ready: what it is timed at, such as "forward", and the task."""


class LeftOut(Exception):
    """This contender cannot take part here; the message says why, in one line."""


class Noted(dict[str, Task]):
    """The tasks of a contender that takes part otherwise than asked; the note says how, in one line."""

    def __init__(self, tasks: Mapping[str, Task], note: str):
        super().__init__(tasks)
        self.note = note


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders that do the same work and so are timed in turns.

    Attributes:
      fields: what the records of this case share, such as section and length.
      builds: by the contender's name.
      reference: the contender that the ratios are relative to; the first that takes part where it does not.
      cost: how long the case takes in comparison with others, for the progress bar.
    """

    fields: Record
    builds: Mapping[str, Build]
    reference: str
    cost: float = 1.0

    @property
    def label(self) -> str:
        return ", ".join(str(value).replace("_", " ") for value in list(self.fields.values())[:2])


@dataclasses.dataclass
class Results:
    """What was measured so far: one record for each contender and figure; who was left out, and why; and notes."""

    records: list[Record] = dataclasses.field(default_factory=list)
    left_out: list[Record] = dataclasses.field(default_factory=list)
    noted: list[Record] = dataclasses.field(default_factory=list)

    def leave_out(self, fields: Record, contender: str, reason: object) -> None:
        """Notes that a contender does not take part in the case of these fields."""
        self.left_out.append({**fields, "contender": contender, "reason": str(reason)})

    def reasons(self) -> list[str]:
        """A line for each contender that was left out and reason."""
        return _lines(self.left_out, "reason")

    def notes(self) -> list[str]:
        """A line for each contender and note."""
        return _lines(self.noted, "note")


def _lines(rows: Sequence[Record], field: str) -> list[str]:
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        at = row.get("length") or row.get("recipe") or row.get("context")
        lines.setdefault((row["contender"], row[field]), []).append(str(at))
    return [f"{name} ({', '.join(dict.fromkeys(at))}): {text}" for (name, text), at in lines.items()]


def run(
    cases: Sequence[Case], rounds: int, results: Results, stop: Callable[[], bool], keep: Callable[[], Any]
) -> None:
    """Times all cases, with a progress bar; ends early, with the rounds that are complete, where `stop` says so.

    Args:
      cases: in the order in which they run.
      rounds: turns of each contender.
      results: grow.
      stop: asked after each round.
      keep: is called after each case.
    """
    if not cases:
        return
    total = sum(case.cost * (rounds + 1) for case in cases)
    layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=total, bar_format=layout, dynamic_ncols=True) as bar:
        for case in cases:
            if stop():
                return
            bar.set_description(case.label)
            _time(case, rounds, results, stop, functools.partial(bar.update, case.cost))
            keep()
            gc.collect()  # what a contender held is free before the next case starts


def _time(case: Case, rounds: int, results: Results, stop: Callable[[], bool], advance: Callable[[], Any]) -> None:
    tasks: dict[tuple[str, str], Task] = {}
    for name, build in case.builds.items():
        try:
            built = build()
            if isinstance(built, Noted):
                results.noted.append({**case.fields, "contender": name, "note": built.note})
            for what, task in built.items():
                task()  # compiles, and fills the caches
                tasks[name, what] = task
                if stop():
                    return
        except (LeftOut, ConfigError) as reason:
            results.leave_out(case.fields, name, reason)
    advance()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    for measured in interleave(tasks, rounds):
        for key, one in measured.items():
            seconds[key].append(one)
        advance()
        if stop():
            break
    results.records.extend(_records(case, seconds))


def _records(case: Case, seconds: Mapping[tuple[str, str], Sequence[float]]) -> list[Record]:
    """Medians and ratios; each figure is compared with the same figure of the reference."""
    names = [name for name, _ in seconds]
    reference = case.reference if case.reference in names else next(iter(names), "")
    return [
        {
            **case.fields,
            "contender": name,
            "what": what,
            "median_seconds": statistics.median(own),
            "reference": reference,
            "ratio": ratio(own, seconds[reference, what]) if (reference, what) in seconds else None,
            "seconds": list(own),
        }
        for (name, what), own in seconds.items()
    ]
