"""Killed jobs: a training run, a comparison, a grid or an export; and permitted leftovers."""

import dataclasses
import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cope_jax.encodings import split_outside_parentheses
from cope_jax.runs.grid.cell import folder_name
from tests.commands.several import free_port

CONFIG = Path(__file__).with_name("tortured_config.py")
KINDS = {
    "train": "train --config={config} --workdir={workdir}",
    "text": "train --config={config}:text --workdir={workdir}",
    "compare": "compare --config={config} --encodings={encodings} --jobs=2 --workdir={workdir}",
    "sweep": "sweep --grid={material}/grid.py --jobs=2 --workdir={workdir}",
    "export": "export --input={material}/text.jsonl --vocab_size=300 --length=32 --workers=2 "
    "--shard_tokens=40000 --out={workdir}",
    "dataset": "export --task=counting --options=max_operations=32 "
    "--sizes=train=3000,pass_10=500 --out={workdir}",
}
"""The command of each kind."""
RUNS = {
    "train": ".",
    "text": ".",
    "compare": "cells/{}/seed_0",
    "sweep": "tortured/cells/{}/seed_0",
}
"""The folder of each run below the workdir, with the encoding's name; exports train nothing, and
write the same bytes each time.
"""
GRID = """
import cope_jax as cj
from cope_jax.runs.grid.cell import Cell


def get_cells():
    for encoding in {encodings!r}:
        yield Cell(cj.config({config!r}, encoding=encoding, job={{"mesh": {{"data": 1}}}}), setting="tortured")
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to kill.

    Attributes:
      mesh: devices along the axes.
      processes: these share the devices evenly.
      kind: one of `KINDS`.
      encodings: those of a comparison, which trains two at a time, and of a grid.
    """

    mesh: dict[str, int]
    processes: int = 1
    kind: str = "train"
    encodings: str = "cope,alibi"

    def runs(self) -> list[str]:
        """The folders of the runs below the workdir."""
        names = map(folder_name, self._names()) if self.kind in RUNS else ()
        return list(dict.fromkeys(RUNS[self.kind].format(name) for name in names))

    def commands(self, workdir: Path | str, material: Path) -> list[list[str]]:
        """The command of each process, always the same but for the port of the first process."""
        values = {"config": CONFIG, "material": material, "workdir": workdir}
        values["encodings"] = self.encodings
        words = [word.format(**values) for word in KINDS[self.kind].split()]
        words = [sys.executable, "-m", "cope_jax", *words]
        if "{config}" in KINDS[self.kind]:
            mesh = {"data": 1, **self.mesh}.items()
            words += [f"--config.job.mesh.{axis}={size}" for axis, size in mesh]
        if self.processes == 1:
            return [words]
        words += [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={self.processes}"]
        return [[*words, f"--process_id={index}"] for index in range(self.processes)]

    def prepare(self, material: Path) -> None:
        """Writes what the commands read."""
        material.mkdir()
        rng = random.Random(0)
        lines = (
            json.dumps({"text": "".join(rng.choices("abcdefgh \n", k=200))}) for _ in range(4000)
        )
        (material / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (material / "grid.py").write_text(GRID.format(encodings=self._names(), config=str(CONFIG)))

    def environment(self, cache: Path, temporary: Path) -> dict[str, str]:
        """As many fake devices as the mesh needs, and a folder of compiled programs, so that later
        starts are short.
        """
        devices = math.prod(self.mesh.values()) // self.processes
        fake = f"--xla_force_host_platform_device_count={devices}"
        return os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {fake}",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TMPDIR": str(temporary),
        }

    def _names(self) -> list[str]:
        return split_outside_parentheses(self.encodings, ",")


def names(folder: Path) -> set[str]:
    """Names in a folder, without numbers of TensorBoard's files and contents of checkpoints."""
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    events = {re.sub(r"tfevents\..*", "tfevents", name) for name in paths}
    return {re.sub(r"(checkpoints/\d+)/.*", r"\1", name) for name in events}


def leftovers(folder: Path, workdirs: list[Path]) -> Iterator[str]:
    """Leftovers of killed commands in `folder` and in later workdirs, a line each."""
    claims = f"cope_jax-{os.getuid()}"  # the locks of cores, which stay
    for path in (folder / "temporary").iterdir():
        if path.name != claims:
            yield f"{path.name} stays in the folder for temporary files"
    known = {"temporary", "material", *(path.name for path in workdirs)}
    for path in folder.iterdir():
        if path.name not in known and path.suffix != ".stderr":
            yield f"{path.name} stays next to the folder"
    straight = names(workdirs[0])
    for workdir in workdirs[1:]:
        here = names(workdir)
        yield from (
            f"{workdir.name}: {name} is {'left' if name in here else 'missing'}"
            for name in here ^ straight
        )


def bytes_differ(straight: Path, other: Path) -> Iterator[str]:
    """The files of an export that differ, a line each."""
    for path in straight.rglob("*"):
        same = other / path.relative_to(straight)
        if path.is_file() and same.is_file() and _content(path) != _content(same):
            yield f"{path.relative_to(straight)} differs"


def _content(path: Path) -> Any:
    """The bytes of a file; of a dataset, those of the fields of each example, which TFDS writes in
    any order.
    """
    folder = path.parent
    if ".array_record-" not in path.name or not (folder / "dataset_info.json").exists():
        return path.read_bytes()
    import tensorflow_datasets as tfds

    split = path.name.split("-")[1].partition(".")[0]
    examples = tfds.builder_from_directory(folder).as_data_source(split)
    return [
        sorted((name, value.tobytes()) for name, value in example.items()) for example in examples
    ]
