"""Killing a run: at which moment, by which signal, and what came of it."""

import dataclasses
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Literal

from experiments.tortures.victim import Victim, Watch, torn

Moment = Literal["any", "checkpoint", "step", "evaluation"]
# In turns, so that few strikes, too, meet every moment; most often the most delicate one.
MOMENTS: tuple[Moment, ...] = ("checkpoint", "any", "step", "checkpoint", "evaluation")
PATIENCE = 600.0  # seconds after which a run that does not end hangs


class BrokenError(Exception):
    """A run did what no run may do; the message says what, in one line."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When and how to strike a start.

    Attributes:
      moment: "any": after `delay`; "checkpoint", "evaluation": while the `count`-th since the start is at work, `delay`
        after it was seen; "step": right after the first.
      number: the signal.
      count: from 1.
      delay: seconds.
    """

    moment: Moment
    number: signal.Signals
    count: int
    delay: float

    @classmethod
    def draw(cls, rng: random.Random, turn: int, duration: float) -> "Plan":
        """The plan of a turn; `duration`, in seconds, is that of a whole run."""
        moment = MOMENTS[turn % len(MOMENTS)]
        number = rng.choice([signal.SIGKILL, signal.SIGTERM])
        longest = {"any": duration, "step": 0.0}.get(moment, 0.03)
        return cls(moment, number, rng.randint(1, 3 if moment == "checkpoint" else 1), rng.uniform(0, longest))


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run, and how it ended.

    Attributes:
      round: the run, of those of one mesh.
      signal: its name; None: the run ended by itself.
      where: what was cut: "start" (up to the first step), "checkpoint", "evaluation", or "steps".
      status: exit status, or minus the signal.
      seconds: from the start to the end.
    """

    round: int
    signal: str | None
    where: Literal["start", "checkpoint", "evaluation", "steps"] | None
    status: int
    seconds: float


def start(
    victim: Victim,
    steps: int,
    evaluate_every: int,
    number: int,
    plan: Plan | None,
    check: Callable[[], object] = lambda: None,
) -> Start:
    """Starts a run, strikes it by the plan, if there is one, and sees it end.

    Args:
      victim: the run.
      steps: of the whole run.
      evaluate_every: steps between evaluations.
      number: of the round.
      plan: None leaves it in peace.
      check: is called again and again; what it raises ends the run, as if it had never been started.

    Raises:
      BrokenError: it ended in another way than it should, or not at all.
    """
    began = time.monotonic()
    watch = Watch(victim.workdir, evaluate_every)
    process = victim.start()
    try:
        where, trained = None, False
        if plan is not None and _await(process, watch, plan, check):
            trained, where = watch.trains(), _place(watch)
            process.send_signal(plan.number)
        while (status := process.poll()) is None:
            check()
            _be_patient(began)
            time.sleep(0.003)
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - began
    words = victim.words.read_text(errors="replace")
    if plan is None or where is None:
        expected = {0}
    elif plan.number == signal.SIGKILL:
        expected = {0, -signal.SIGKILL}
        where = "checkpoint" if torn(victim.workdir) and where != "start" else where
    elif trained and not watch.finished(steps):
        expected = {128 + signal.SIGTERM}
    else:
        expected = {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    if status not in expected or "Traceback" in words:
        after = f" after {plan.number.name} ({where})" if plan is not None and where is not None else ""
        last = (words.strip().splitlines() or ["nothing on stderr"])[-1][-300:]
        raise BrokenError(f"status {status}{after}, not {' or '.join(map(str, sorted(expected)))}: {last}")
    struck = plan is not None and where is not None and status != 0
    return Start(number, plan.number.name if plan and struck else None, where if struck else None, status, seconds)


def _await(process: "subprocess.Popen[bytes]", watch: Watch, plan: Plan, check: Callable[[], object]) -> bool:
    """Waits for the moment of the plan; False if the process ends before."""
    seen: dict[Moment, Callable[[], bool]] = {
        "any": lambda: True,
        "checkpoint": watch.writes,
        "step": watch.stepped,
        "evaluation": watch.evaluates,
    }
    began = time.monotonic()
    left, now, strike_at = plan.count, False, None
    while process.poll() is None:
        check()
        _be_patient(began)
        watch.stepped()
        before, now = now, seen[plan.moment]()
        left -= now and not before
        if left <= 0 and strike_at is None:
            strike_at = time.monotonic() + plan.delay
        if strike_at is not None and time.monotonic() >= strike_at:
            return True
        time.sleep(0.003)
    return False


def _be_patient(since: float) -> None:
    if time.monotonic() - since > PATIENCE:
        raise BrokenError(f"it hangs: no end after {PATIENCE:.0f} s")


def _place(watch: Watch) -> Literal["start", "checkpoint", "evaluation", "steps"]:
    if not watch.stepped():
        return "start"
    if watch.writes():
        return "checkpoint"
    return "evaluation" if watch.evaluates() else "steps"
