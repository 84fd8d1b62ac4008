import io
import os
import signal
import sys

import jax
import pytest

from cope_jax.errors import Interrupted
from cope_jax.training import preemption as module
from cope_jax.training.preemption import GracefulStop

pytestmark = pytest.mark.newest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number, capfd):
    with GracefulStop() as interruption:
        assert not interruption.requested()
        signal.raise_signal(number)
        assert interruption.requested()
    words = capfd.readouterr().err
    assert "then saving" in words and ("press Ctrl-C again" in words) == (number == signal.SIGINT)


def test_a_second_ctrl_c_leaves_at_once():
    with GracefulStop() as interruption:
        signal.raise_signal(signal.SIGTERM)
        # What sends SIGTERM may send it again: no reason to lose the checkpoint.
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: sys.exit(130)])
def test_a_second_ctrl_c_does_what_the_first_did_before(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with GracefulStop():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt if handler == signal.SIG_IGN else SystemExit):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_may_come_while_a_line_is_printed(monkeypatch):
    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        def write(self, line):
            if interruption.number is None:
                signal.raise_signal(signal.SIGINT)
            return len(line)

    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Terminal()), write_through=True)
    )
    with GracefulStop() as interruption:
        print("progress", file=sys.stderr, flush=True)
        assert interruption.requested()


def test_a_run_that_has_nothing_to_save_leaves_signals_as_they_are_until_it_begins():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with GracefulStop(later=True) as interruption:
        assert {number: signal.getsignal(number) for number in before} == before
        for _ in range(2):
            interruption.begin()
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested()
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_handlers_from_before_come_back(error):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(error) if error else GracefulStop():
        with GracefulStop():
            assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
            if error:
                raise error
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_is_that_of_the_signal(number, code):
    with GracefulStop() as interruption:
        assert interruption.number is None
        signal.raise_signal(number)
    assert interruption.number == number
    assert Interrupted("stopped", interruption.number).exit_code == code


@pytest.fixture
def several(monkeypatch):
    """Two processes; the other must stop before the third step. Gives the signals handed on."""
    handed = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        module.multihost_utils, "reached_preemption_sync_point", lambda step: step == 3
    )
    monkeypatch.setattr(os, "kill", lambda process, number: handed.append((process, number)))
    return handed


def test_several_processes_stop_after_the_same_step(several):
    with GracefulStop() as interruption:
        assert [interruption.requested() for _ in range(3)] == [False, False, True]
    assert interruption.number == signal.SIGTERM
    assert not several


def test_ctrl_c_in_one_of_several_processes_is_handed_to_jax(several):
    before = signal.getsignal(signal.SIGTERM)
    with GracefulStop(later=True) as interruption:
        assert signal.getsignal(signal.SIGTERM) == before, "JAX has its handler there"
        signal.raise_signal(signal.SIGINT)
        assert several == [(os.getpid(), signal.SIGTERM)]
        assert not interruption.requested(), "not before the others"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
