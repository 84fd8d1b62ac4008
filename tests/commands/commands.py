"""Commands in processes of their own, forked from one that has imported everything, so that a start
costs little.
"""

import dataclasses
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from cope_jax.cli import interrupts

ROOT = Path(__file__).parents[2]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "cope_jax.runs.experiment",
        "cope_jax.evaluation.report.plots",
        "cope_jax.evaluation.gates.maps",
    ]
)

CONFIG = """
from cope_jax.training import config_files


def get_config():
    return config_files.experiment(
        "selective_copy",
        {"num_symbols": 4, "num_tokens": 2, "num_blanks": 2},
        model={"num_layers": 1, "block": {"model_dim": 8, "dropout": 0.1}},
        encodings={"cope": {"npos_max": 4}},
        optimizer={"warmup_steps": 2},
        training={
            "steps": 24,
            "batch_size": 4,
            "examples": 10,
            "steps_per_dispatch": 2,
            "evaluate_every": 4,
            "checkpoint_every": 4,
        },
        evaluation={"examples": 6, "curve_examples": 4, "sweep_examples": 2, "batch_size": 4},
        job={"mesh": {"data": 1}},
    )
"""
"""A config file of which all is tiny but the number of steps, so that there is something to
interrupt.
"""


RARE = ("--config.training.evaluate_every=8", "--config.training.checkpoint_every=8")
"""Flags of the comparisons that tests share."""

SEVERAL_RUNS = ("compare", "tag", "classify")
"""Commands that would start a process for each run, which takes seconds."""


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a command: its exit status (minus the signal that killed it) and its output."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of the error; fails where there is a traceback or more than that line."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.rstrip().endswith(lines[0]), self.err
        return lines[0].removeprefix("error: ")


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The surroundings of a command when it starts.

    Attributes:
      folder: the current folder.
      gone: whether this folder is deleted.
      encoding: of stdout.
      variables: environment variables.
      streams: what else file descriptors are: a path, or "" for a closed one.
    """

    folder: Path = ROOT
    gone: bool = False
    encoding: str = "utf-8"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    streams: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Command:
    """A command that runs as `cope-jax NAME FLAGS` does, or a tool as `python -m tools.NAME FLAGS`
    does.

    Args:
      cache: a folder for compiled programs, so that a second start costs little too.
      around: its surroundings.
    """

    def __init__(
        self, cache: Path, name: str, *flags: object, around: Surroundings = Surroundings()
    ):
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = Path(self._folder.name) / "out", Path(self._folder.name) / "err"
        self._out.touch()
        self._err.touch()
        arguments = (
            str(cache),
            name,
            [str(flag) for flag in flags],
            str(self._out),
            str(self._err),
        )
        self._process = _FORKS.Process(target=_child, args=(*arguments, around))
        self._process.start()

    def wait(self, seconds: float = 600, kill: bool = True) -> Done:
        self._process.join(seconds)
        if self._process.exitcode is None:
            if kill:
                self.send(signal.SIGKILL)
            raise TimeoutError(self._err.read_text())
        with self._folder:
            return Done(
                self._process.exitcode,
                *(path.read_text(errors="replace") for path in (self._out, self._err)),
            )

    def send(self, number: int) -> None:
        """Sends a signal."""
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def signal_when(self, ready: Callable[[], bool], number: int) -> None:
        """Sends the signal as soon as `ready`, unless the command has ended by then."""
        while self._process.exitcode is None and not ready():
            time.sleep(0.002)
        self.send(number)


def _child(
    cache: str,
    name: str,
    flags: list[str],
    out: str,
    err: str,
    around: Surroundings = Surroundings(),
) -> None:
    streams = {1: out, 2: err, **around.streams}
    for number, path in streams.items():
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        else:
            os.close(number)
    sys.stdout = open(1, "w", closefd=False, encoding=around.encoding) if streams[1] else None
    sys.stderr = (
        open(2, "w", closefd=False, buffering=1, errors="backslashreplace") if streams[2] else None
    )
    os.environ.update(around.variables)
    os.chdir(around.folder)
    if around.gone:
        around.folder.rmdir()
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    several = name in SEVERAL_RUNS and not any(
        flag.startswith(("--jobs", "--help")) for flag in flags
    )
    sys.argv = [name, *flags, *(["--jobs=1"] if several else [])]
    interrupts.install()
    try:
        if name.startswith("tools."):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            from cope_jax.cli.run import run_command

            sys.argv.insert(0, "cope-jax")
            run_command()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
