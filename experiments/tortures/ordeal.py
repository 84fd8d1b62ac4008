"""All that one mesh goes through: a run left in peace, then the same run killed again and again."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cope_jax.training.metrics import read_metrics
from experiments.tortures import strikes, verdict
from experiments.tortures.strikes import BrokenError, Plan, Start
from experiments.tortures.victim import Victim, parse_mesh


@dataclasses.dataclass
class Ordeal:
    """The ordeal of one mesh; what is done is kept in its folder, so that another command goes on from there.

    A run is killed until it ends, and compared with the one left in peace; the next round is a new one. After the last
    kill the round is left to end.

    Attributes:
      folder: of this mesh.
      mesh: as `victim.parse_mesh` reads it.
      kills: how many.
      seed: of the moments.
      cache: a folder for compiled programs.
    """

    folder: Path
    mesh: str
    kills: int
    seed: int
    cache: Path

    def __post_init__(self):
        rows: list[Any] = read_metrics(self._log)
        self.starts = [Start(**row) for row in rows]

    @property
    def _log(self) -> Path:
        return self.folder / "starts.jsonl"

    def struck(self) -> list[Start]:
        """The starts that were killed."""
        return [start for start in self.starts if start.signal is not None]

    def run(self, killed: Callable[[], object], check: Callable[[], object]) -> list[str]:
        """Goes through with it, and says what is wrong, a line each.

        Args:
          killed: is called after each kill.
          check: is called again and again; it may raise what ends the ordeal in good order.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = []
        try:
            if not self._ended(0):
                self._start(0, None, check)
            while len(self.struck()) < self.kills:
                if len(self.starts) > 4 * self.kills + 8:
                    raise BrokenError(
                        f"{len(self.starts)} starts, and no more than {len(self.struck())} kills: too short"
                    )
                before = len(self.struck())
                self._start(self._round(), self._plan(), check)
                if len(self.struck()) > before:
                    killed()
            if self.starts[-1].signal is not None:
                self._start(self._round(), None, check)
        except BrokenError as error:
            found.append(f"{self._workdir(self._round()).name}: {error}")
        for number in range(1, self._round()):
            lines = verdict.differences(self._workdir(0), self._workdir(number))
            found += [f"{self._workdir(number).name}: {line}" for line in lines]
        return found

    def _workdir(self, number: int) -> Path:
        return self.folder / (f"round_{number}" if number else "straight")

    def _ended(self, number: int) -> bool:
        return any(start.round == number and start.status == 0 for start in self.starts)

    def _round(self) -> int:
        """The first that has not ended."""
        return next(number for number in range(len(self.starts) + 2) if not self._ended(number))

    def _plan(self) -> Plan:
        rng = random.Random(f"{self.seed} {self.mesh} {len(self.starts)}")
        shortest = min(start.seconds for start in self.starts if start.status == 0)
        return Plan.draw(rng, len(self.starts) - 1, shortest)

    def _start(self, number: int, plan: Plan | None, check: Callable[[], object]) -> None:
        training = verdict.read_config().training
        victim = Victim(self._workdir(number), parse_mesh(self.mesh), self.cache)
        start = strikes.start(victim, training.steps, training.evaluate_every, number, plan, check)
        self.starts.append(start)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(dataclasses.asdict(start)) + "\n")
