"""Progress is a bar on a terminal and in a notebook, and plain lines anywhere else."""

import contextlib
import os
import sys
import termios
import types

import pytest

from cope_jax import progress
from cope_jax.progress import Progress

pytestmark = pytest.mark.newest


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, and that the test sets."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_a_log_has_a_line_at_most_every_30_seconds_and_one_before_each_line_of_text(clock, capsys):
    with Progress(2000, "step", label="cope") as shown:
        shown.write("begins")
        shown.advance(1)
        shown.start_clock()
        for _ in range(9):
            clock.seconds += 10
            shown.advance(1, "loss 0.500")
        clock.seconds += 10
        shown.advance(1)
        shown.write("step 11: loss 0.50")
        shown.write("step 11: saved")
    assert capsys.readouterr().err.splitlines() == [
        "begins",
        "cope: 4/2,000 steps, loss 0.500, 5:32:40 left",
        "cope: 7/2,000 steps, loss 0.500, 5:32:10 left",
        "cope: 10/2,000 steps, loss 0.500, 5:31:40 left",
        "cope: 11/2,000 steps, 5:31:30 left",
        "step 11: loss 0.50",
        "step 11: saved",
    ]


def test_the_first_remaining_time_leaves_out_compilation(clock, capsys):
    with Progress(600, "step", label="cope") as shown:
        shown.compiling()
        clock.seconds += 59
        shown.start_clock(10, "loss 2.000")
        clock.seconds += 30
        shown.advance(10, "loss 1.000")
    assert capsys.readouterr().err.splitlines() == [
        "cope: compiling",
        "cope: 10/600 steps, loss 2.000",
        "cope: 20/600 steps, loss 1.000, 29:00 left",
    ]


@pytest.fixture
def cell(monkeypatch):
    """The texts that one output of a notebook's cell has had, one after the other."""
    texts = []

    def display(data, *, raw, display_id):
        assert raw and display_id
        texts.append(data["text/plain"])
        return types.SimpleNamespace(update=lambda data, raw: texts.append(data["text/plain"]))

    shell = types.SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return texts


def test_a_notebook_has_one_output_that_changes_in_place(cell, capsys):
    with Progress(600, "step") as shown:
        shown.write("decoder, cope")
        shown.compiling()
        compiling = cell[-1]
        shown.start_clock(10, "loss 2.000")
        started = cell[-1]
        shown.advance(20, "loss 1.000")
        shown.write("step 30: 1.2 % token error")
    assert capsys.readouterr() == ("", "")
    assert compiling.startswith("decoder, cope\n  0%|") and compiling.endswith(
        "| 0/600 [00:00<?, compiling]"
    )
    assert started.startswith("decoder, cope\n  2%|") and started.endswith(
        "| 10/600 [00:00<?, loss 2.000]"
    )
    *lines, bar = cell[-1].splitlines()
    assert lines == ["decoder, cope", "step 30: 1.2 % token error"]
    assert bar.startswith("  5%|") and bar.endswith("loss 1.000]") and "| 30/600 [00:0" in bar
    assert all(len(line) <= 80 for text in cell for line in text.splitlines())


def test_a_bar_that_is_not_left_leaves_the_lines_in_a_notebook(cell):
    with Progress(3, "sentence", leave=False) as shown:
        shown.write("text")
        shown.advance(3)
    assert cell[-1].rstrip() == "text"
    with Progress(3, active=False):
        pass
    assert cell[-1].rstrip() == "text"


def test_short_work_without_text_leaves_nothing_in_a_log(clock, capsys):
    with Progress(3, "sentence") as shown:
        shown.advance(3)
    assert capsys.readouterr().err == ""


def test_work_without_a_unit_is_a_percentage(clock, capsys):
    with Progress(8) as shown:
        clock.seconds += 30
        shown.advance(2)
    assert capsys.readouterr().err == "25%, 01:30 left\n"


def test_what_is_not_active_says_nothing(clock, capsys):
    with Progress(8, active=False) as shown:
        clock.seconds += 99
        shown.advance(2)
        shown.write("text")
    assert capsys.readouterr() == ("", "")


def test_the_bar_fits_80_columns_and_what_is_written_stands_above_it(monkeypatch):
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with Progress(40_000, "step", done=10) as shown:
            shown.advance(10_000, "loss 2.090, 16.5k tok/s, MFU 43 %, 12.3 GiB")
            shown.start_clock()
            shown.write("step 10,010: loss 0.50")
            shown.advance(10, "loss 2.090, 16.5k tok/s, MFU 43 %, 12.3 GiB")
    text = b""
    with contextlib.suppress(OSError):  # the end of what a closed terminal has shown
        while chunk := os.read(screen, 2**12):
            text += chunk
    os.close(screen)
    text = text.decode()
    states = [line for line in text.replace("\n", "\r").split("\r") if "%|" in line]
    assert states and all(len(state) <= 80 for state in states), states
    assert states[-1].startswith(" 25%|") and "10020/40000 [" in states[-1]
    assert states[-1].endswith("loss 2.090, 16.5k tok/s, MFU 43 %, 12.3 GiB]")
    assert "\rstep 10,010: loss 0.50\r\n" in text
