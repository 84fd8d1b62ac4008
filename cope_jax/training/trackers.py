"""Sends metrics to a service that tracks experiments, such as Weights & Biases or trackio."""

import importlib
import inspect
import secrets
import sys
from pathlib import Path
from typing import Any

from cope_jax.errors import ConfigError
from cope_jax.storage.files import write_atomically
from cope_jax.storage.mirror import shown

TENSORBOARD, NONE = "tensorboard", "none"


def package(tracker: str) -> Any:
    """The package of a tracker, None if it needs none. ConfigError: it is not installed."""
    try:
        return None if tracker in (TENSORBOARD, NONE) else importlib.import_module(tracker)
    except ImportError as error:
        reason = f"job.tracker={tracker} needs a package that is not installed"
        raise ConfigError(f"{reason}: pip install {tracker}") from error


def _begin(module: Any, options: dict[str, Any]) -> Any:
    """Begins a run of the service, with those of the options that its `init` accepts."""
    accepted = inspect.signature(module.init).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        options = {name: options[name] for name in accepted if name in options}
    return module.init(**options)


class Tracker:
    """One run of a service; the numbers of a step are sent together.

    A service that cannot be reached never stops training: a line on stderr says so, and
    `metrics.jsonl` has all rows.

    Args:
      tracker: the name of the package, which has `init`, and runs with `log` and `finish`, as wandb
        has; or "none".
      directory: the workdir of the run. `tracker.txt` there has the name under which a resumed run
        continues.
      step: the step from which the run resumes; 0 starts another run of the service.
      config: the settings of the run.
    """

    def __init__(self, tracker: str, directory: Path, step: int, config: Any):
        self._tracker, self._run = tracker, None
        self._step, self._numbers = step, dict[str, float]()
        if module := package(tracker):
            path = directory / "tracker.txt"
            if not step or not path.exists():
                write_atomically(path, secrets.token_hex(8))
            number = path.read_text(encoding="utf-8")
            options = {"project": "cope_jax", "config": config}
            options |= {"name": f"{shown(directory)} {number}"}
            options |= {"id": number, "dir": str(directory), "resume": "allow"}
            self._run = self._call(_begin, module, options)

    def add(self, name: str, value: float, step: int) -> None:
        """Adds a number of a step."""
        if step != self._step:
            self._send()
        self._step = step
        self._numbers[name] = value

    def close(self) -> None:
        """Sends what is left, and ends the run of the service."""
        self._send()
        if self._run is not None:
            self._call(self._run.finish)

    def _send(self) -> None:
        if self._run is not None and self._numbers:
            self._call(self._run.log, self._numbers, step=self._step)
        self._numbers = {}

    def _call(self, function: Any, *values: Any, **options: Any) -> Any:
        try:
            return function(*values, **options)
        except Exception as error:  # whatever the service raises, training continues
            reason = " ".join(str(error).split()) or type(error).__name__
            print(
                f"warning: {self._tracker} gets no more metrics of this run ({reason})",
                file=sys.stderr,
            )
            self._run = None
