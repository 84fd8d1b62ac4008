"""Kills a small training run again and again, and shows that it ends with the same bits as one that
is left alone.

JAX_PLATFORMS=cpu python -m tools.torture --kills=50 --seed=0 --workdir=runs/torture

SIGKILL and SIGTERM come at random moments from the start of the process on, and on purpose while a
checkpoint is written, right after the first step, and during evaluation. Parameters, optimizer,
random key, place in the data and metrics are compared. `--bucket=gs://…` or `--bucket=s3://…` keeps
the runs in a bucket. `--processes=2` splits the devices of each run among processes; all of them
are killed, or one is asked to stop. `--kinds` names what is killed: a run on each mesh, and on one
device a run on text, a comparison and a grid that train two runs at a time, and exports of shards
and of a dataset. After its last start, a command must have left nothing that a command without
kills does not leave: in its folder, next to it, and in the folder for temporary files. With
JAX_PLATFORMS=cpu the devices are fake ones, as many as a mesh needs; else those that are there.
Exit status: 0 all is equal, 1 it is not, 2 wrong input.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cope_jax import tasks
from cope_jax.evaluation.report.table import Table
from cope_jax.evaluation.report.table import console as wide_console
from cope_jax.runs.workdir import Workdir
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.storage.mirror import mirrored
from cope_jax.training import from_config
from cope_jax.training.experiment_config import ExperimentConfig, MeshConfig
from cope_jax.training.program import Program
from tools.torture import killing
from tools.torture.killing import PLACES, BrokenError, Plan, Start
from tools.torture.tortured import KINDS, Job, bytes_differ, leftovers

MESHES = "data=4,fsdp=4,tensor=4,data=2+fsdp=2+tensor=2"


def main() -> int:
    """Kills, compares, and prints a table."""
    parser = argparse.ArgumentParser("python -m tools.torture", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="A new folder for all runs.")
    add("--kills", type=int, default=50, help="How many, shared among the meshes and other kinds.")
    add("--seed", type=int, default=0, help="Of the moments and signals.")
    add("--meshes", default=MESHES, help="Devices along the axes of each mesh.")
    add(
        "--bucket", help="A new folder in a bucket for all runs; then --workdir is for local files."
    )
    add("--processes", type=int, default=1, help="How many share the devices of a run.")
    add("--kinds", default="train", help=f"What to kill: any of {', '.join(KINDS)}.")
    add("--encodings", default="cope,alibi", help="Those of a comparison and a grid.")
    options = parser.parse_args()
    try:
        jobs = read_jobs(options)
    except ValueError as error:
        parser.error(str(error))
    # The devices are for the runs, which are processes of their own.
    jax.config.update("jax_platforms", "cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left behind
    rows, wrong = [], []
    with tqdm(total=options.kills, unit="kill", dynamic_ncols=True) as bar:
        for number, (text, job) in enumerate(jobs.items()):
            bar.set_description(text)
            folder, share = options.workdir.resolve() / text, (options.kills + number) // len(jobs)
            starts, mistakes = torture(folder, job, share, options.seed, bar.update, options.bucket)
            rows.append(row(text, starts, mistakes))
            wrong += [f"{text}: {line}" for line in mistakes]
    console = wide_console()
    headings = ["killed", "verdict", "kills", "SIGKILL", "SIGTERM", *PLACES.values()]
    headings += ["runs", "starts", "seconds"]
    console.print(Table("Killed again and again", headings, rows, text_columns=2).rich())
    for line in wrong:
        console.print(line, markup=False, soft_wrap=True)
    return 1 if wrong else 0


def read_jobs(options: argparse.Namespace) -> dict[str, Job]:
    """The jobs to kill, by the text of a mesh or by a kind; ValueError for wrong options."""
    meshes = {text: parse_mesh(text) for text in options.meshes.split(",")}
    kinds, processes = options.kinds.split(","), options.processes
    unknown = [kind for kind in kinds if kind not in KINDS]
    uneven = [mesh for mesh in meshes.values() if math.prod(mesh.values()) % max(1, processes)]
    mistakes = {
        f"--workdir={options.workdir} exists: delete it, or choose another": (
            options.workdir.exists()
        ),
        f"--kills={options.kills} must be at least 1": options.kills < 1,
        f"--processes={processes} does not split the devices of each mesh evenly": (
            processes < 1 or uneven
        ),
        f"--kinds={options.kinds} has an unknown one: choose from {', '.join(KINDS)}": unknown,
        "--processes is for --kinds=train": processes > 1 and kinds != ["train"],
        "--bucket is for --kinds=train,compare,text": (
            options.bucket and not {"train", "compare", "text"}.issuperset(kinds)
        ),
    }
    for text, wrong in mistakes.items():
        if wrong:
            raise ValueError(text)
    jobs = {text: Job(mesh, processes) for text, mesh in meshes.items() if "train" in kinds}
    others = [kind for kind in kinds if kind != "train"]
    return jobs | {kind: Job({"data": 1}, 1, kind, options.encodings) for kind in others}


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of a mesh, as {"fsdp": 2, "tensor": 2} of "fsdp=2+tensor=2"; ValueError for anything
    else.
    """
    axes, known = {}, {field.name for field in dataclasses.fields(MeshConfig)}
    for term in text.split("+"):
        axis, _, size = term.partition("=")
        if axis not in known or not size.isdecimal() or not 0 < int(size) <= 64:
            raise ValueError(
                f"--meshes: {term!r} is no axis and number of devices up to 64, as in fsdp=2+tensor=2"
            )
        axes[axis] = int(size)
    return axes


def torture(
    folder: Path,
    job: Job,
    kills: int,
    seed: int,
    killed: Callable[[], object] = lambda: None,
    bucket: str | None = None,
) -> tuple[list[Start], list[str]]:
    """Leaves a run alone, then kills others until they end and compares each with the first.

    After the last kill the run is left to end. With `bucket` the runs are in this folder of a
    bucket, and `folder` is for their temporary files.

    Returns:
      All starts, the first of which is that of the run left alone; and what is wrong, a line each.
    """
    folder.mkdir(parents=True)
    rng = random.Random(f"{seed} {folder.name}")
    material, temporary = folder / "material", folder / "temporary"
    job.prepare(material)
    temporary.mkdir()
    variables = job.environment(folder.parent / "compiled", temporary)
    moments = killing.MOMENTS if job.runs() else killing.MOMENTS_OF_EXPORTS
    starts, done, wrong = list[Start](), list[Path](), list[str]()

    def place(workdir: Path) -> str:
        return str(workdir) if bucket is None else f"{bucket}/{folder.name}/{workdir.name}"

    left, workdir = kills, folder / "straight"
    try:
        while left or starts[-1].signal is not None:
            if len(starts) > 4 * kills + 8:
                raise BrokenError(
                    f"{len(starts)} starts, and no more than {kills - left} kills: too short"
                )
            plan = None
            if done and left:
                shortest = min(start.seconds for start in starts if start.signal is None)
                plan = Plan.draw(rng, len(starts) - 1, shortest, job.processes, moments)
            commands, url = job.commands(place(workdir), material), bucket and place(workdir)
            starts.append(killing.start(workdir, commands, variables, plan, job.runs(), url))
            if starts[-1].signal is not None:
                left -= 1
                killed()
            else:
                done.append(workdir)
                workdir = folder / f"round_{len(done)}"
    except BrokenError as error:
        wrong.append(f"{workdir.name}: {error}")
    for run in done[1:]:
        with mirrored(place(done[0])) as straight, mirrored(place(run)) as other:
            mistakes = [] if job.runs() else list(bytes_differ(Path(straight), Path(other)))
            for name in job.runs():
                where = "" if name == "." else f"{name}: "
                lines = differences(Path(straight, name), Path(other, name))
                mistakes += [f"{where}{line}" for line in lines]
            wrong += [f"{run.name}: {line}" for line in mistakes]
    if bucket is None and not wrong:
        wrong += leftovers(folder, done)
    return starts, wrong


def row(mesh: str, starts: list[Start], wrong: list[str]) -> list[str]:
    """The cells of a mesh."""
    signals = collections.Counter(start.signal for start in starts)
    places = collections.Counter(start.where for start in starts)
    counts = [signals["SIGKILL"], signals["SIGTERM"], *(places[moment] for moment in PLACES)]
    counts += [signals[None] - 1, len(starts)]
    seconds = f"{sum(start.seconds for start in starts):.0f}"
    kills = signals["SIGKILL"] + signals["SIGTERM"]
    return [mesh, "different" if wrong else "identical", str(kills), *map(str, counts), seconds]


def program(workdir: Path) -> Program:
    """The program of a run that was killed, on one device."""
    return _program(json.dumps(Workdir(workdir).settings()["config"]))


@functools.cache
def _program(settings: str) -> Program:
    config = ExperimentConfig.from_mapping(json.loads(settings))
    task = tasks.create(config.task.name, **config.task.options)
    return from_config.create_program(config, task, devices=jax.devices()[:1])


def differences(straight: Path, other: Path) -> list[str]:
    """Differences between the ends of two runs, a line each; none if all is bit-identical.

    Compared are every leaf of the state in the last checkpoint, the places in the data,
    `metrics.jsonl` byte by byte, and the records of `result.json` without their wall time.
    """
    ours, theirs = _end(other), _end(straight)
    names = sorted(ours.keys() | theirs.keys())
    mistakes = [f"{name} differs" for name in names if ours.get(name) != theirs.get(name)]
    lines, wanted = (
        (folder / "metrics.jsonl").read_bytes().splitlines(True) for folder in (other, straight)
    )
    pairs = enumerate(itertools.zip_longest(lines, wanted), start=1)
    first = next((number for number, (line, right) in pairs if line != right), None)
    return mistakes if first is None else [*mistakes, f"metrics.jsonl differs from line {first} on"]


def _end(workdir: Path) -> dict:
    """The end of a run, by name; of each leaf of the state, type, shape and bytes."""
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(program(workdir).state_shapes())
    assert restored is not None, f"{workdir} has no checkpoint"
    step, state, progress = restored
    records = json.loads((workdir / "result.json").read_text())["records"]
    for record in records:
        for name in ("wall_seconds", "memory_gib"):
            record.pop(name, None)
    contents = {"last checkpoint": step, "place in the data": progress["data"]}
    contents["result.json"] = records
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        contents[name] = (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
    return contents


if __name__ == "__main__":
    sys.exit(main())
