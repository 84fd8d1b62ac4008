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
    """The results so far: a record for each contender and measurement, and contenders left out
    with reasons.
    """

    records: list[Record] = dataclasses.field(default_factory=list)
    left_out: list[Record] = dataclasses.field(default_factory=list)

    def reasons(self) -> list[str]:
        """One line for each contender and reason, with the sizes or recipes."""
        lines: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.left_out:
            at = row.get("length") or row.get("recipe") or row.get("context")
            lines.setdefault((row["contender"], row["reason"]), {})[str(at)] = None
        return [f"{name} ({', '.join(at)}): {text}" for (name, text), at in lines.items()]


def run(
    cases: Sequence[Case],
    rounds: int,
    results: Results,
    stop: Callable[[], bool],
    keep: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Times all cases, each contender in `rounds` rounds by `clock`, and calls `keep` after each case.

    Calls `stop` after each round. If `stop` returns True, ends early and keeps the complete rounds.
    """
    if not cases:
        return
    with Progress(sum(case.cost * (rounds + 1) for case in cases)) as progress:
        for case in cases:
            if stop():
                return
            progress.label = ", ".join(map(str, list(case.fields.values())[:2]))
            advance = functools.partial(progress.advance, case.cost)
            _time(case, rounds, results, stop, advance, clock)
            keep()
            gc.collect()  # frees the contenders' memory before the next case starts


def _time(
    case: Case,
    rounds: int,
    results: Results,
    stop: Callable[[], bool],
    advance: Callable[[], Any],
    clock: Callable[[], float],
) -> None:
    tasks: dict[tuple[str, str], Task] = {}
    for name, build in case.builds.items():
        try:
            for kind, task in build().items():
                task()  # compiles, and fills the caches
                tasks[name, kind] = task
                if stop():
                    return
        except (LeftOut, ConfigError) as reason:
            results.left_out.append({**case.fields, "contender": name, "reason": str(reason)})
    advance()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    for seconds_of_round in interleave(tasks, rounds, clock=clock):
        for key, of_task in seconds_of_round.items():
            seconds[key].append(of_task)
        advance()
        if stop():
            break
    names = [name for name, _ in tasks]
    reference = case.reference if case.reference in names else next(iter(names), "")
    for (name, kind), times in seconds.items():
        of_reference = seconds.get((reference, kind))
        record = {**case.fields, "contender": name, "what": kind, "reference": reference}
        record["median_seconds"] = statistics.median(times)
        record["ratio"] = of_reference and ratio(times, of_reference)
        results.records.append(record | {"seconds": times})


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
