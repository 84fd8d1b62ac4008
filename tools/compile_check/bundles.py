"""Reads how many bundles a TPU kernel and each of its loops has, from the text that libtpu's
compiler dumps.

A bundle is what a TPU issues in one cycle. Stalls of memory are not in the count.
"""

import dataclasses
import os
import re
from pathlib import Path

ENVIRONMENT = "LIBTPU_INIT_ARGS"
_BUNDLE = re.compile(r"\s*0x([0-9a-f]+)\s*(\w\w)?\s*:\s*(>*)\s*\{")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The bundles of one kernel.

    Attributes:
      straight: the bundles outside of loops, for one block of queries.
      loops: the bundles of one iteration of each loop, in the order of the program.
    """

    straight: int
    loops: tuple[int, ...]


def dump_into(folder: Path) -> None:
    """Makes libtpu dump what it compiles; call it before libtpu is loaded.

    Even a small program takes gigabytes.
    """
    os.environ[ENVIRONMENT] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def read(folder: Path, name: str) -> Kernel:
    """Reads the newest kernel of this name; its transformations are in parentheses around it."""
    files = [
        path
        for path in folder.glob("*-final_bundles.txt")
        if re.match(rf"\d+-(\w+_)?{name}_*\.?\d*-\d+-final", path.name)
    ]
    return parse(max(files, key=lambda path: path.stat().st_mtime).read_text())


def parse(text: str) -> Kernel:
    """Reads the bundles. A loop begins at a bundle marked LB; the bundles within it have as many
    `>`, or more.

    The grid is a loop around everything. A loop within a loop counts as one iteration of it.
    """
    bundles = [bundle for line in text.splitlines() if (bundle := _BUNDLE.match(line))]
    depths, loops = [len(bundle[3]) for bundle in bundles], []
    for start, bundle in enumerate(bundles):
        if bundle[2] == "LB" and depths[start] == 2:
            end = start
            while end + 1 < len(bundles) and depths[end + 1] >= 2:
                end += 1
            loops.append(end + 1 - start)
    return Kernel(len(bundles) - sum(loops), tuple(loops))
