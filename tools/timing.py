"""Times functions that do the same work.

They run in turns, so that other load on the machine slows all of them.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cope_jax.errors import ConfigError
from cope_jax.progress import Progress
from cope_jax.runs.records import Record

K = TypeVar("K")
Task = Callable[[], Any]
"""Does its work once and returns when it is done."""
Build = Callable[[], Mapping[str, Task]]
"""Prepares a contender. Returns its tasks by the name of the measurement, such as "forward"."""

TURN_SECONDS = 0.05
PAUSE_SECONDS = 0.01  # before each turn, so that idle threads of the previous library stop spinning


class LeftOut(Exception):
    """This contender cannot take part here. The message says why, in one line."""


class WithNote(dict[str, Task]):
    """The tasks of a contender that runs in another way than requested.

    The note says how, in one line.
    """

    def __init__(self, tasks: Mapping[str, Task], note: str):
        super().__init__(tasks)
        self.note = note


@dataclasses.dataclass(frozen=True)
class Case:
    """Contenders that do the same work, and are therefore timed in turns."""

    fields: Record  # what the records of this case share, such as section and length
    builds: Mapping[str, Build]  # by the contender's name
    # The contender that ratios are relative to; if it is left out, the first one that takes part.
    reference: str
    cost: float = 1.0  # how long the case takes relative to other cases, for the progress bar


@dataclasses.dataclass
class Results:
    """The results so far: a record for each contender and measurement, contenders left out with
    reasons, and notes.
    """

    records: list[Record] = dataclasses.field(default_factory=list)
    left_out: list[Record] = dataclasses.field(default_factory=list)
    notes: list[Record] = dataclasses.field(default_factory=list)

    def lines(self) -> tuple[list[str], list[str]]:
        """Returns (one line for each contender and reason, one line for each contender and note)."""
        return _lines(self.left_out, "reason"), _lines(self.notes, "note")


def _lines(rows: Sequence[Record], field: str) -> list[str]:
    lines: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        at = row.get("length") or row.get("recipe") or row.get("context")
        lines.setdefault((row["contender"], row[field]), {})[str(at)] = None
    return [f"{name} ({', '.join(at)}): {text}" for (name, text), at in lines.items()]


def run(
    cases: Sequence[Case],
    rounds: int,
    results: Results,
    stop: Callable[[], bool],
    keep: Callable[[], Any],
) -> None:
    """Times all cases, each contender in `rounds` rounds, and calls `keep` after each case.

    Calls `stop` after each round. If `stop` returns True, ends early and keeps the complete rounds.
    """
    if not cases:
        return
    with Progress(sum(case.cost * (rounds + 1) for case in cases)) as progress:
        for case in cases:
            if stop():
                return
            progress.label = ", ".join(
                str(value).replace("_", " ") for value in list(case.fields.values())[:2]
            )
            _time(case, rounds, results, stop, functools.partial(progress.advance, case.cost))
            keep()
            gc.collect()  # frees the contenders' memory before the next case starts


def _time(
    case: Case, rounds: int, results: Results, stop: Callable[[], bool], advance: Callable[[], Any]
) -> None:
    tasks: dict[tuple[str, str], Task] = {}
    for name, build in case.builds.items():
        try:
            built = build()
            if isinstance(built, WithNote):
                results.notes.append({**case.fields, "contender": name, "note": built.note})
            for kind, task in built.items():
                task()  # compiles, and fills the caches
                tasks[name, kind] = task
                if stop():
                    return
        except (LeftOut, ConfigError) as reason:
            results.left_out.append({**case.fields, "contender": name, "reason": str(reason)})
    advance()
    measured = []
    for one_round in interleave(tasks, rounds):
        measured.append(one_round)
        advance()
        if stop():
            break
    seconds = {key: [one_round[key] for one_round in measured] for key in tasks}
    names = [name for name, _ in tasks]
    reference = case.reference if case.reference in names else next(iter(names), "")
    for (name, kind), seconds_of_task in seconds.items():
        of_reference = seconds.get((reference, kind))
        times = {"median_seconds": statistics.median(seconds_of_task), "reference": reference}
        times |= {
            "ratio": of_reference and ratio(seconds_of_task, of_reference),
            "seconds": seconds_of_task,
        }
        results.records.append({**case.fields, "contender": name, "what": kind, **times})


def interleave(
    tasks: Mapping[K, Task],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[K, float]]:
    """Runs all tasks in turns, and yields after each round the seconds that one call of each task
    took.

    In each turn, a short task is called several times, for `TURN_SECONDS`, and the median time of
    these calls counts. Every other round runs in reverse order, so that no task always follows the
    same task. The caller must have called each task once before.
    """
    for number in range(rounds):
        seconds = {}
        for key in list(tasks)[:: -1 if number % 2 else 1]:
            sleep(PAUSE_SECONDS)
            began, calls = clock(), list[float]()
            while not calls or clock() - began < TURN_SECONDS:
                start = clock()
                tasks[key]()
                calls.append(clock() - start)
            seconds[key] = statistics.median(calls)
        yield {key: seconds[key] for key in tasks}


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median over the rounds of (seconds of a task)/(seconds of the reference in the same
    round).

    Other load that lasts for a whole round slows both tasks, so it does not change the ratio.
    """
    return statistics.median(
        second / other for second, other in zip(seconds, reference, strict=True)
    )
