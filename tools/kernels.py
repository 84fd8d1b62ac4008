r"""Compiles the fused attention kernels for an accelerator without having one, and counts what they
take.

python -m tools.kernels --topology=v5e:2x2 --encodings=cope,rope --lengths=2048,8192 --head_dim=128
python -m tools.kernels --topology=h200:1 --encodings=cope,rope --head_dim=64

For a TPU it counts cycles. A cycle issues one bundle of instructions. The count has the bundles
that libtpu's compiler schedules, times the iterations of each loop for random queries and keys.
Stalls of memory are not in it: a prediction, not a measurement. With --blocks, the sizes of
attention/kernels/tpu/tpu_sizes.json can be compared with others.

For a GPU it reads the registers of a thread, the bytes of its stack, to which registers spill, and
the shared memory of a program. It needs '.[gpu-kernels]'.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console

from cope_jax.cli import outputs
from cope_jax.cli.flag_values import read_names, read_numbers
from cope_jax.cli.run import run
from cope_jax.encodings import EncodingConfig
from cope_jax.evaluation.report.table import Table
from cope_jax.storage.locks import unfinished
from tools.compile_check import bundles, chips, gpu_resources, kernel_cycles
from tools.compile_check.kernel_cycles import Problem

_TOPOLOGY = flags.DEFINE_string(
    "topology", "v5e:2x2", f"Accelerator to compile for, such as {chips.known()}."
)
_ENCODINGS = flags.DEFINE_string("encodings", "cope,rope", "Encodings, separated by commas.")
_LENGTHS = flags.DEFINE_list("lengths", "2048", "Numbers of tokens, separated by commas.")
_HEADS = flags.DEFINE_integer("heads", 8, "Number of query heads.", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer(
    "kv_heads", None, "Number of key/value heads; without this flag, as many as --heads."
)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Width of a head.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", "bfloat16", ["bfloat16", "float32"], "Type of queries, keys and values."
)
_BLOCKS = flags.DEFINE_list(
    "blocks",
    None,
    "Numbers of queries, near keys and far keys in a block, for a TPU; without this flag, those of the chip.",
)
_JSON = flags.DEFINE_string(
    "json", None, "JSON file to write the counts to; without this flag, they are only printed."
)


def main() -> None:
    """Compiles one forward and one backward kernel for each encoding and length, and prints what
    they take.
    """
    labels = read_names("encodings", _ENCODINGS.value, EncodingConfig.parse)
    lengths = read_numbers("lengths", _LENGTHS.value)
    blocks = None if _BLOCKS.value is None else tuple(read_numbers("blocks", _BLOCKS.value))
    heads = _HEADS.value, _KV_HEADS.value or _HEADS.value
    problems = [
        Problem(label, length, *heads, _HEAD_DIM.value, _DTYPE.value, blocks)
        for length in lengths
        for label in labels
    ]
    chip, _ = chips.find(_TOPOLOGY.value)
    counted, table = _for_tpu(problems) if chip.platform == "tpu" else _for_gpu(problems, chip.name)
    Console(highlight=False).print(table.rich())
    if _JSON.value is not None:
        with outputs.writing(_JSON.value, "json"):
            Path(_JSON.value).write_text(json.dumps(counted, indent=1) + "\n")


def _for_gpu(problems: list[Problem], kind: str) -> tuple[list[dict[str, Any]], Table]:
    counted = [
        dataclasses.asdict(problem) | gpu_resources.count(problem, kind) for problem in problems
    ]
    headings = ["tokens", "encoding", "kernel", "blocks", "registers", "stack", "shared KiB"]
    rows = []
    for row in counted:
        for name, resources in row["kernels"].items():
            numbers = (resources["registers"], resources["stack"], resources["shared"] // 1024)
            blocks = "×".join(map(str, resources["blocks"]))
            rows.append((str(row["length"]), row["encoding"], name, blocks, *map(str, numbers)))
    return counted, Table(f"kernels for {kind}", headings, rows)


def _for_tpu(problems: list[Problem]) -> tuple[list[dict[str, Any]], Table]:
    with unfinished() as folder:
        bundles.dump_into(folder)
        device = chips.describe(_TOPOLOGY.value).devices[0]
        counted = [kernel_cycles.count(problem, device, folder) for problem in problems]
    headings = ["tokens", "encoding", "blocks", "forward", "backward", "both", "÷ last"]
    both = [row["forward"]["cycles"] + row["backward"]["cycles"] for row in counted]
    last = {row["length"]: total for row, total in zip(counted, both, strict=True)}
    rows = []
    for row, total in zip(counted, both, strict=True):
        cycles = row["forward"]["cycles"], row["backward"]["cycles"], total
        cells = (f"{count:,.0f}" for count in cycles)
        case = str(row["length"]), row["encoding"], "×".join(map(str, row["blocks"]))
        rows.append((*case, *cells, f"{total / last[row['length']]:.2f}"))
    return counted, Table("cycles of one head", headings, rows)


if __name__ == "__main__":
    run(main)
