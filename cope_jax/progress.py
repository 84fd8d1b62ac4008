"""Shows the progress of a loop: a bar in terminals and notebooks, plain lines elsewhere."""

import io
import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 30.0
"""The minimum time between two plain lines, so that a log stays short."""


class Progress:
    """A context manager that shows how much of a loop is done and how much time is left.

    On a terminal, it shows a bar that fits 80 columns. In a notebook, one output of the cell has
    the written lines and, below them, the bar, updated in place. Anywhere else, such as in a file,
    it prints a plain line at most every 30 seconds, because every update of a bar would leave a
    line there.

    Args:
      total: the amount of work.
      unit: the name of one piece of work, in the singular; "" shows only the percentage.
      label: the name of the loop, shown before the amount. The caller may change the attribute
        `label` in the loop.
      done: the amount that is done before the loop starts.
      leave: whether the finished bar stays on the terminal or in the notebook; False removes it.
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
        # The text after the amount; the amount in the last line.
        self._note, self._reported = "", done
        self._first, self._began, self._last = done, time.monotonic(), time.monotonic()
        self._bar: Any = None
        kind = _NotebookBar if _in_notebook() else tqdm
        if active and (kind is _NotebookBar or sys.stderr.isatty()):
            count = "{n_fmt}/{total_fmt} " if unit else ""
            shown = "{desc}{percentage:3.0f}%|{bar}| " + count + "[{elapsed}<{remaining}{postfix}]"
            options = {
                "bar_format": shown,
                "unit_scale": total >= 1e6,
                "dynamic_ncols": True,
                "smoothing": 0,
            }
            self._bar = kind(total=total, initial=done, leave=leave, **options)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: float, note: str = "") -> None:
        """Adds `amount` to the work done; `note` is shown after the total amount done."""
        self._done, self._note = self._done + amount, note
        if self._bar is not None:
            self._bar.set_description_str(self._prefix(), refresh=False)
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() - self._last >= SECONDS:
            self._tell()

    def compiling(self) -> None:
        """Says that the first piece of work waits for compilation."""
        if self._bar is not None:
            self._bar.set_postfix_str("compiling")
        else:
            self.write(f"{self._prefix()}compiling")

    def start_clock(self, amount: float = 0, note: str = "") -> None:
        """Advances by `amount`; measures the speed from now on, without compilation."""
        self._first, self._began = self._done + amount, time.monotonic()
        self.advance(amount, note)
        if self._bar is not None:
            self._bar.initial = self._bar.last_print_n = self._bar.n
            self._bar.start_t = self._bar.last_print_t = time.time()
            self._bar.refresh()

    def write(self, line: str) -> None:
        """Prints `line` above the bar on a terminal and in a notebook.

        Anywhere else, a plain line with the amount done so far comes first if the amount has
        changed.
        """
        if not self._active:
            return
        if self._bar is None and self._reported != self._done:
            self._tell()
        (self._bar or tqdm).write(line, sys.stderr)

    def _prefix(self) -> str:
        return f"{self.label}: " if self.label else ""

    def _tell(self) -> None:
        """Prints a plain line: the amount done, the last note and the remaining time."""
        self._reported, self._last = self._done, time.monotonic()
        amount = f"{self._done:,.0f}/{self._total:,.0f} {self._unit}s" if self._unit else ""
        parts = [amount or f"{self._done / self._total:.0%}", self._note]
        if self._first < self._done < self._total:
            left = (
                (self._last - self._began) * (self._total - self._done) / (self._done - self._first)
            )
            parts.append(f"{tqdm.format_interval(left)} left")
        if self._active:
            print(self._prefix() + ", ".join(filter(None, parts)), file=sys.stderr, flush=True)


class _NotebookBar(tqdm):
    """A bar in the output of a notebook's cell, updated in place, below written lines."""

    def __init__(self, **options: Any):
        from IPython.display import display  # notebooks have it

        self.lines: list[str] = []
        self.output = display({"text/plain": ""}, raw=True, display_id=True)
        super().__init__(
            file=io.StringIO(), **options | {"ascii": False, "dynamic_ncols": False, "ncols": 80}
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        del pos
        text = "\n".join([*self.lines, str(self) if msg is None else msg])
        self.output.update({"text/plain": text}, raw=True)

    def write(self, line: str, file: Any = None) -> None:
        del file
        self.lines.append(line)
        self.refresh()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
