"""Calls commands with random wrong input, and counts the answers that are not clear.

    JAX_PLATFORMS=cpu python -m tools.fuzz --cases=2000 --seed=0 --workdir=runs/fuzz

A good answer is a result, or one line with the status 2, 3 or 4, within `--limit` seconds. A
traceback, another status, a hang, or a result of an absurd setting is a finding. Training that
shows progress is stopped at the limit, and must then end with status 143. Exit status: 0 no
finding, 1 findings, 2 wrong input.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from tests.commands.commands import CONFIG, ROOT, Command, Done
from tests.storage.bucket_server import serving
from tools.fuzz import cases
from tools.fuzz.cases import Case, Material
from tools.fuzz.servers import mirror

STATUSES = (0, 2, 3, 4)


def main() -> int:
    """Runs the cases and prints the findings."""
    parser = argparse.ArgumentParser("python -m tools.fuzz", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="A new folder for all files.")
    add("--cases", type=int, default=2000, help="Number of cases.")
    add("--seed", type=int, default=0, help="Random seed of the cases.")
    add("--only", type=int, help="The number of the only case to run.")
    add("--limit", type=float, default=20, help="Seconds until a command must end or progress.")
    add("--jobs", type=int, default=os.cpu_count(), help="Number of cases at a time.")
    options = parser.parse_args()
    if options.workdir.exists():
        parser.error(f"--workdir={options.workdir} exists: delete it, or choose another")
    numbers = range(options.cases) if options.only is None else [options.only]
    ends: collections.Counter[str] = collections.Counter()
    findings = []
    with tqdm(total=len(numbers), unit="case", dynamic_ncols=True) as bar:
        folder = options.workdir.resolve()
        for number, case, done, problem in run(
            folder, options.seed, numbers, options.jobs, options.limit
        ):
            bar.update()
            ends[f"{case.kind}: {'stopped' if done is None else f'status {done.status}'}"] += 1
            if problem:
                text = f"case {number} ({case.kind}, {case.text!r}): {problem}\n  {_line(case)}"
                findings.append(text)
                bar.write(text)
    for end, count in sorted(ends.items()):
        print(f"{end}: {count}")
    print(f"{len(findings)} findings in {len(numbers)} cases")
    return 1 if findings else 0


def run(
    folder: Path, seed: int, numbers: Sequence[int], jobs: int = 1, limit: float = 60
) -> Iterator[tuple[int, Case, Done | None, str | None]]:
    """Yields each case with how it ended and what is wrong with that, None if nothing is."""
    folder.mkdir(parents=True)
    with mirror() as url, serving():
        material = Material(folder / "material", url)
        prepare(material)

        def one(number: int) -> tuple[int, Case, Done | None, str | None]:
            out = folder / f"case_{number}"
            out.mkdir()
            case = cases.draw(seed, number, material, out)
            done, problem = judge(case, material.folder / "compiled", out, limit)
            # Multiprocessing has not learned how it ended.
            if done is not None and done.status == 255:
                done, problem = judge(case, material.folder / "compiled", out, limit)
            if not problem:
                shutil.rmtree(out, ignore_errors=True)
            return number, case, done, problem

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(one, number) for number in numbers]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def prepare(material: Material) -> None:
    """Makes the runs and files that cases damage."""
    material.folder.mkdir()
    material.config.write_text(CONFIG)
    for name, out in (
        ("train", material.run),
        ("export of shards", material.shards),
        ("train of shards", material.text),
        ("convert", material.model),
    ):
        flags = material.base(out)[name]
        done = Command(material.folder / "compiled", _name(name), *flags).wait()
        if done.status:
            raise RuntimeError(f"{name} {' '.join(flags)}: {done.err}")


def judge(case: Case, cache: Path, folder: Path, limit: float) -> tuple[Done | None, str | None]:
    """Runs a case in a folder; how it ended, None if it was stopped, and what is wrong."""
    here = folder / "here" if case.around.gone else folder
    here.mkdir(exist_ok=True)
    around = dataclasses.replace(case.around, folder=here)
    command = Command(cache, _name(case.command), *case.flags, around=around)
    began = time.monotonic()
    try:
        done = command.wait(limit, kill=False)
    except TimeoutError as slow:
        trains = any(word in str(slow) for word in (" tok/s", " steps", "\ncompiling"))
        command.send(signal.SIGTERM if trains else signal.SIGKILL)
        try:
            if trains:
                return _stopped(command.wait(2 * limit))
        except TimeoutError as hung:
            slow = hung
        seconds = time.monotonic() - began
        return None, f"it hangs: no end after {seconds:.0f} s: {str(slow)[-200:]!r}"
    if "Traceback" in done.err or "Traceback" in done.out:
        return done, f"a traceback: {done.err.strip().splitlines()[-1][:300]}"
    if done.status not in STATUSES:
        return done, f"status {done.status}: {done.err[-300:]!r}"
    if done.status and 2 not in case.around.streams:
        lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or not done.err.rstrip().endswith(lines[0]):
            return done, f"not one line: {done.err[-500:]!r}"
    elif case.absurd:
        return done, "an absurd setting is accepted"
    return done, None


def _stopped(done: Done) -> tuple[Done | None, str | None]:
    """The end of training that was asked to stop."""
    if done.status in (143, -signal.SIGTERM, *STATUSES):
        return None, None
    return done, f"status {done.status}: {done.err[-300:]}"


def _name(command: str) -> str:
    """The name of a command or tool, of what a case calls it."""
    name = command.partition(" ")[0]
    return f"tools.{name}" if (ROOT / "tools" / f"{name}.py").exists() else name


def _line(case: Case) -> str:
    words = shlex.join(["cope-jax", _name(case.command), *case.flags])[:1500]
    around = f"  # {case.around}" if case.kind == "around" else ""
    return words.encode(errors="backslashreplace").decode() + around


if __name__ == "__main__":
    sys.exit(main())
