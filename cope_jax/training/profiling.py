"""Profiles chosen steps with XLA's profiler."""

import dataclasses
import re
from pathlib import Path

import jax

from cope_jax.errors import ConfigError


@dataclasses.dataclass
class Profile:
    """A context manager that profiles the steps from `first` to `last` into `folder`.

    On exit, the context manager ends a profile that is still open.

    `first` and `last` count finished steps, as the progress bar does: 100:110 means the ten steps
    after step 100. A dispatch is profiled completely if any of its steps was chosen. Each profile
    is a folder `plugins/profile/TIME`. View the folder with TensorBoard and its profile plugin, or
    with XProf. A profile contains no calls of Python functions, because tracing them would slow the
    steps down. The first dispatch of a run compiles: choose later steps.

    >>> with Profile.parse("100:110", Path("runs/rope/profile")) as profile:
    ...     profile.at(0, 10)  # before each dispatch
    ...     profile.first, profile.last
    (100, 110)
    """

    first: int
    last: int
    folder: Path
    _running: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def parse(cls, text: str | None, folder: Path) -> "Profile":
        """The profile of the steps `FIRST:LAST`; None profiles nothing.

        Raises:
          ConfigError: the text is not two numbers, or there is no step between the numbers.
        """
        if text is None:
            return cls(0, 0, folder)
        match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ConfigError(
                f"cannot profile the steps {text!r}: write FIRST:LAST, with FIRST < LAST, as in 100:110"
            )
        return cls(int(match[1]), int(match[2]), folder)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._turn(on=False)

    def at(self, step: int, steps: int) -> None:
        """Starts the profile if the next dispatch has a chosen step; otherwise, ends the profile.

        Call this before each dispatch, when the results of the previous dispatch are available.
        `step` is the number of steps done so far, and `steps` is the number of steps in the next
        dispatch.
        """
        self._turn(on=step < self.last and step + steps > self.first)

    def _turn(self, *, on: bool) -> None:
        if on and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
        if self._running and not on:
            self._running = False  # even if writing it fails
            jax.profiler.stop_trace()
        self._running = on
