"""Shows on stderr how far a long loop is, as a bar on a terminal and as plain lines anywhere else."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 30.0
"""The minimum time between two plain lines, so that a log stays short."""


class Progress:
    """A context manager that shows how much of a loop is done and how much time is left.

    On a terminal, it shows a bar that fits 80 columns. Anywhere else, such as in a file or a notebook, it prints a
    plain line at most every 30 seconds, because every update of a bar would leave a line there.

    Args:
      total: the amount of work.
      unit: the name of one piece of work, in the singular; "" shows only the percentage.
      label: the name of the loop, shown before the amount. The caller may change the attribute `label` in the loop.
      done: the amount that is done before the loop starts.
      leave: whether the finished bar stays on the terminal; False removes it.
      active: if False, nothing is shown, as in all processes except the first.

    >>> with Progress(total=4, unit="step", active=False) as progress:
    ...     progress.advance(2, "loss 0.500")
    """

    def __init__(
        self,
        total: float,
        unit: str = "",
        *,
        label: str = "",
        done: float = 0,
        leave: bool = True,
        active: bool = True,
    ):
        self.label = label
        self._total, self._unit, self._done, self._active = total, unit, done, active
        self._note, self._told = "", done  # the text after the amount; the amount in the last line
        self._first, self._began, self._last = done, time.monotonic(), time.monotonic()
        self._bar: Any = None
        if active and sys.stderr.isatty():
            count = "{n_fmt}/{total_fmt} " if unit else ""
            shown = "{desc}{percentage:3.0f}%|{bar}| " + count + "[{elapsed}<{remaining}{postfix}]"
            options = {"bar_format": shown, "unit_scale": total >= 1e6, "dynamic_ncols": True, "smoothing": 0}
            self._bar = tqdm(total=total, initial=done, leave=leave, **options)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: float, note: str = "") -> None:
        """Adds `amount` to the work done; `note` is shown after the total amount done."""
        self._done, self._note = self._done + amount, note
        if self._bar is not None:
            self._bar.set_description_str(f"{self.label}: " if self.label else "", refresh=False)
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() - self._last >= SECONDS:
            self._tell()

    def start_clock(self) -> None:
        """Restarts the measurement of speed and remaining time, because the time before was spent on compilation."""
        self._first, self._began = self._done, time.monotonic()
        if self._bar is not None:
            self._bar.initial = self._bar.last_print_n = self._bar.n
            self._bar.start_t = self._bar.last_print_t = time.time()
            self._bar.refresh()

    def write(self, line: str) -> None:
        """Prints `line` above the bar on a terminal.

        Anywhere else, a plain line with the amount done so far comes first if the amount has changed.
        """
        if not self._active:
            return
        if self._bar is None and self._told != self._done:
            self._tell()
        tqdm.write(line, sys.stderr)

    def _tell(self) -> None:
        """Prints a plain line: the amount done, the last note and the remaining time."""
        self._told, self._last = self._done, time.monotonic()
        amount = f"{self._done:,.0f}/{self._total:,.0f} {self._unit}s" if self._unit else ""
        parts = [amount or f"{self._done / self._total:.0%}", self._note]
        if self._first < self._done < self._total:
            left = (self._last - self._began) * (self._total - self._done) / (self._done - self._first)
            parts.append(f"{tqdm.format_interval(left)} left")
        if self._active:
            label = f"{self.label}: " if self.label else ""
            print(label + ", ".join(filter(None, parts)), file=sys.stderr, flush=True)
