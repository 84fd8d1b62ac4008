"""Compiles a training step for accelerators that may be absent, and predicts its memory,
communication and speed.

python -m tools.compile_check --config=lm:1b_noise --topology=v5e:4x4 --config.job.mesh.fsdp=16

The step is the one that `cope-jax train` runs, on the mesh of `config.job.mesh` over all devices of
the topology. The exit status is 0 if the step fits into memory, 1 if it does not fit, and 2 if the
input is wrong.
"""

import json
import sys
from pathlib import Path

from absl import flags
from rich.console import Console

from cope_jax.cli import config_flags, outputs
from cope_jax.cli.run import run
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.table import Table
from tools.compile_check import chips
from tools.compile_check.figures import compile_step, notes, rows

_CONFIG = config_flags.DEFINE_config("config", purpose="Config of the training step (required). ")
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    f"Accelerator and topology to compile for, such as {chips.known()} (required).",
    required=True,
)
_JSON = flags.DEFINE_string(
    "json",
    None,
    "JSON file to write the numbers to; without this flag, the numbers are only printed.",
)
flags.mark_flag_as_required("config")


def main() -> None:
    """Compiles the step, and prints the memory, the communication between devices, and the times of
    its program.
    """
    config = config_flags.read_config(_CONFIG.value)
    path = None if _JSON.value is None else Path(_JSON.value)
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write --json={path}: create the folder {path.parent} first")
    step = compile_step(config, chips.describe(_TOPOLOGY.value))
    console = Console(highlight=False)
    console.print(Table("fits" if step["fits"] else "does not fit", ["", ""], rows(step)).rich())
    for note in notes(step):
        console.print(note, markup=False)
    if path is not None:
        with outputs.writing(path, "json"):
            path.write_text(json.dumps(step, indent=1) + "\n")
    if not step["fits"]:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
