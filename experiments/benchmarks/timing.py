"""Times of several functions, taken in turns, so that a machine that slows down slows all of them."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

K = TypeVar("K")
Task = Callable[[], Any]
"""Does its work once and returns when it is done."""

TURN_SECONDS = 0.05
PAUSE_SECONDS = 0.01  # in which the idle threads of the library before stop to spin


def interleave(
    tasks: Mapping[K, Task],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[K, float]]:
    """Runs all tasks in turns, and yields after each round the seconds that one call of each took in it.

    In a turn a short task is called several times, for `TURN_SECONDS`, and the median counts. Every other round runs
    backwards, so that no task always follows the same one. Nothing is warmed up here.

    Args:
      tasks: by any key.
      rounds: how often each has its turn.
      clock: seconds.
      sleep: waits for some seconds.
    """
    for number in range(rounds):
        order = list(tasks) if number % 2 == 0 else list(tasks)[::-1]
        seconds = {}
        for key in order:
            sleep(PAUSE_SECONDS)
            seconds[key] = _turn(tasks[key], clock)
        yield {key: seconds[key] for key in tasks}


def _turn(task: Task, clock: Callable[[], float]) -> float:
    began = clock()
    calls: list[float] = []
    while not calls or clock() - began < TURN_SECONDS:
        start = clock()
        task()
        calls.append(clock() - start)
    return statistics.median(calls)


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """How many times the reference's time: the median over the rounds of each round's own ratio.

    Load that lasts for a round is in both of its times, and so not in their ratio.

    >>> ratio([2.0, 40.0, 6.0], [1.0, 10.0, 2.0])
    3.0
    """
    return statistics.median(own / other for own, other in zip(seconds, reference, strict=True))
