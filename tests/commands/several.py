"""The training command in several processes on this machine, as on several hosts."""

import os
import signal
import socket
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.commands.commands import _FORKS, Done, _child


class Processes:
    """A command that runs in `count` processes, each with its own devices; one of them alone is the
    plain command.

    Args:
      cache: as `Command` has it.
      count: of processes.
      devices: of each.
      flags: of the command.
      each: flags of each process that the others do not have.
      command: the name of the command.
      variables: environment variables.
    """

    def __init__(
        self,
        cache: Path,
        count: int,
        devices: int,
        *flags: object,
        each: Sequence[Sequence[object]] = (),
        command: str = "train",
        variables: Mapping[str, str] = types.MappingProxyType({}),
    ):
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [
            [f"{self._folder.name}/{name}{i}" for name in ("out", "err")] for i in range(count)
        ]
        environment = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **variables,
        }
        port = free_port()
        self.processes = []
        for i, logs in enumerate(self._logs):
            given = [str(flag) for flag in (*flags, *(each[i] if each else ()))]
            if count > 1:
                given += [
                    f"--coordinator=127.0.0.1:{port}",
                    f"--num_processes={count}",
                    f"--process_id={i}",
                ]
            process = _FORKS.Process(
                target=_forked, args=(environment, str(cache), command, given, *logs)
            )
            process.start()
            self.processes.append(process)

    def wait(self, seconds: float = 300) -> list[Done]:
        """The end of each; those that are left after so many seconds are killed."""
        late = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, late - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        with self._folder:
            texts = [[Path(log).read_text() for log in logs] for logs in self._logs]
        return [
            Done(process.exitcode, *text)
            for process, text in zip(self.processes, texts, strict=True)
        ]

    def signal_when(self, ready: Callable[[], bool], index: int, number: signal.Signals) -> None:
        """Sends the signal to one of the processes as soon as `ready`, unless one has ended by
        then.
        """
        while not ready():
            if any(process.exitcode is not None for process in self.processes):
                return
            time.sleep(0.002)
        os.kill(self.processes[index].pid, number)


def free_port() -> int:
    """A port that no process listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _forked(environment: dict[str, str], *arguments: object) -> None:
    os.environ.update(environment)
    _child(*arguments)
