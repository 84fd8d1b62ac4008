"""Measures the memory of the forward and backward pass. Each contender runs in a separate process.

python -m tools.benchmark.memory_use CONTENDER PROBLEM_AS_JSON [FILE_OF_AN_ENCODING ...]
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cope_jax import encodings
from cope_jax.errors import ConfigError
from cope_jax.progress import Progress
from tools.benchmark import contenders, process
from tools.benchmark.workloads import BACKWARD, ROOT, Problem
from tools.timing import LeftOut, Results


def run(
    problems: Sequence[Problem],
    names: Sequence[str],
    results: Results,
    stop: Callable[[], bool],
    keep: Callable[[], Any],
    files: Sequence[str] = (),
) -> None:
    """Measures every contender on every problem; `files` have the encodings that are not ours.

    Calls `keep` after each problem; ends early if `stop` returns True.
    """
    with Progress(sum(problem.length for problem in problems) * len(names)) as progress:
        for problem in problems:
            for name in names:
                progress.label = f"memory, {problem.length}"
                fields = {"section": "memory", **vars(problem)}
                record = {
                    **fields,
                    "contender": name,
                    "what": BACKWARD,
                    **measure(name, problem, *files),
                }
                if stop():
                    return
                (results.left_out if "reason" in record else results.records).append(record)
                progress.advance(problem.length)
            keep()


def measure(name: str, problem: Problem, *files: str) -> dict[str, Any]:
    """Runs `measure_here` in a new process.

    Returns the result or, if the process fails, the `reason`.
    """
    command = [sys.executable, "-m", __name__, name, json.dumps(vars(problem)), *files]
    done = subprocess.run(command, cwd=ROOT, env=process.untuned(), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.splitlines() or ["?"])[-1]
        died = f"ended by signal {-done.returncode}" if done.returncode < 0 else last
        return {"reason": f"the process failed: {died}"}
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(name: str, problem: Problem, *files: str) -> dict[str, Any]:
    """Measures memory in this process, which must not have computed anything before.

    Returns the `reason` why the contender does not take part, or three numbers:

    - `temp_bytes`: what XLA allocates in addition to arguments and results; None for other
      libraries
    - `start_bytes`: resident memory before the first call, with libraries, inputs and the compiled
      program
    - `peak_bytes`: the maximum of resident memory during two calls
    """
    for file in files:
        encodings.load(file)
    try:
        task = contenders.find(name)(problem)[BACKWARD]
        temp_bytes = getattr(task, "temp_bytes", None)  # compiles
    except (LeftOut, ConfigError) as reason:
        return {"reason": str(reason)}
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not forget.exists():
        return {"reason": "only Linux reports the peak of resident memory"}

    def peak() -> int:
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", status.read_text())[0])

    with contextlib.suppress(OSError):
        # Resets the peak to the current memory, because compilation must not count.
        forget.write_text("5")
    start_bytes = peak()
    task()
    task()
    return {"temp_bytes": temp_bytes, "start_bytes": start_bytes, "peak_bytes": peak()}


if __name__ == "__main__":
    name, problem, *files = sys.argv[1:]
    print(json.dumps(measure_here(name, Problem(**json.loads(problem)), *files)))
