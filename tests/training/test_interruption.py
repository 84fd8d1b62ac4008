import io
import signal
import sys

import pytest

from cope_jax.training.interruption import Interruption

pytestmark = pytest.mark.newest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number, capfd):
    with Interruption() as interruption:
        assert not interruption.requested()
        signal.raise_signal(number)
        assert interruption.requested()
    assert "saving and stopping" in capfd.readouterr().err


def test_a_second_ctrl_c_leaves_at_once():
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # what sends SIGTERM may send it again: no reason to lose the checkpoint
        assert interruption.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_may_come_while_a_line_is_printed(monkeypatch):
    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        def write(self, line):
            if interruption.number is None:
                signal.raise_signal(signal.SIGINT)
            return len(line)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Terminal()), write_through=True))
    with Interruption() as interruption:
        print("progress", file=sys.stderr, flush=True)
        assert interruption.requested()


@pytest.mark.parametrize("error", [None, ValueError])
def test_the_handlers_from_before_come_back(error):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(error) if error else Interruption():
        with Interruption():
            assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
            if error:
                raise error
    assert {number: signal.getsignal(number) for number in before} == before
