r"""Measures attention, its memory, decoding and training steps, of cope_jax and of other libraries, interleaved.

python -m experiments.benchmark --only=attention --lengths=512,1024,2048,4096 --workdir=runs/benchmark

Writes benchmark.json (every median and every single time), benchmark.md and plots of time against length into the
workdir. JAX's work is split over its devices (on a CPU, one for each core): attention by heads, a training step by its
batch. Memory and decoding use one device; --devices=1 uses one for everything. With `pip install 'cope-jax[bench]'` the
contenders of PyTorch take part. Ctrl-C ends the benchmark and keeps what was measured.
"""

import dataclasses
import functools
import sys
from pathlib import Path

from absl import flags
from rich.console import Console

from cope_jax.encodings import EncodingConfig
from cope_jax.files import write_atomically
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import Record
from cope_jax.training.preemption import GracefulStop, Interrupted
from experiments.benchmark import benchmark_report, contenders, devices, memory_use, process, timing
from experiments.benchmark.workloads import Recipe, cores, read_problems
from experiments.cli import entry
from experiments.cli.flag_values import check_names, read_names

SECTIONS = ("attention", "memory", "decode", "train")

_ONLY = flags.DEFINE_list("only", list(SECTIONS), f"Sections to measure, of {', '.join(SECTIONS)}.")
_LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096"], "Lengths at which attention is timed.")
_MEMORY_LENGTHS = flags.DEFINE_list("memory_lengths", ["2048", "8192", "32768"], "Lengths at which memory is measured.")
_CONTEXTS = flags.DEFINE_list("contexts", ["4096"], "Context lengths at which decoding is timed.")
_NPOS_MAX = flags.DEFINE_list("npos_max", ["64"], "Sizes of CoPE's table; T means the length.")
_CONTENDERS = flags.DEFINE_string(
    "contenders",
    ",".join(contenders.DEFAULT),
    "What the sections attention and memory compare: default names, or ENCODING/IMPLEMENTATION, as alibi/blockwise.",
)
_ENCODINGS = flags.DEFINE_string(
    "encodings", "cope,rope,none", "Encodings for decoding and training; ratios are relative to the first."
)
_RECIPES = flags.DEFINE_list(
    "recipes",
    ["selective_copy_small:64", "selective_copy:4", "counting:4"],
    "Files of experiments/configs whose training steps are timed; NAME:BATCH sets the batch size.",
)
_REFERENCE = flags.DEFINE_string(
    "reference", None, "The contender that attention's ratios are relative to; without it, the first."
)
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences in the attention problem.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "Heads in the attention problem.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "Width of a head in the attention problem.", lower_bound=2)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of queries, keys and values.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds that time every contender; medians are over rounds.", lower_bound=1)
_DEVICES = flags.DEFINE_integer(
    "devices", 0, "JAX devices that share attention and training; 0: all (a CPU has one per core).", lower_bound=0
)
_TUNE = flags.DEFINE_bool(
    "tune",
    True,
    "Restart with an allocator that keeps its memory, idle threads that sleep, and a CPU split into several devices.",
)
_WORKDIR = flags.DEFINE_string("workdir", "runs/benchmark", "Folder for the report.")


def main() -> None:
    """Measures, and writes the report even if interrupted."""
    check_names("section of --only", _ONLY.value, SECTIONS)
    names = read_names("contenders", _CONTENDERS.value, contenders.find)
    reference = names[0] if _REFERENCE.value is None else _REFERENCE.value
    check_names("--reference", [reference], names)
    sizes = (_BATCH.value, _HEADS.value, _HEAD_DIM.value, _DTYPE.value)
    timed, weighed, decoded = (
        read_problems(flag.name, flag.value, _NPOS_MAX.value, *sizes) for flag in (_LENGTHS, _MEMORY_LENGTHS, _CONTEXTS)
    )
    labels = read_names("encodings", _ENCODINGS.value, EncodingConfig.parse)
    recipes = [Recipe.parse(text) for text in _RECIPES.value]
    if _TUNE.value:
        process.restart(["-m", "experiments.benchmark", *sys.argv[1:]], _DEVICES.value or cores())
    shared = devices.choose(_DEVICES.value)
    workdir = Path(_WORKDIR.value)
    facts, results, cases = process.facts(), timing.Results(), []
    if "attention" in _ONLY.value:
        split = [dataclasses.replace(problem, devices=shared) for problem in timed]
        cases += contenders.attention_cases(split, names, reference)
    if "decode" in _ONLY.value:
        cases += [contenders.decoding_case(problem, labels) for problem in decoded]
    if "train" in _ONLY.value:
        cases += contenders.training_cases(recipes, labels, shared)

    def stop() -> bool:
        return interruption.number is not None

    keep = functools.partial(write, workdir, facts, results)
    try:
        with workdirs.locked(workdir), GracefulStop() as interruption:
            timing.run(cases, _ROUNDS.value, results, stop, keep)
            if "memory" in _ONLY.value and not stop():
                memory_use.run(weighed, names, results, stop, keep)
            keep()
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; {workdir} has the cases that were complete") from None
    benchmark_report.write_plots(workdir, results.records)
    show(workdir, facts, results)
    if interruption.number is not None:
        raise Interrupted(f"stopped early; {workdir} has what was measured so far")


def write(workdir: Path, facts: Record, results: timing.Results) -> None:
    """Writes everything that was measured so far."""
    workdirs.write_json(workdir / "benchmark.json", {"environment": facts, **vars(results)})
    write_atomically(workdir / "benchmark.md", benchmark_report.markdown(results.records, *results.lines(), facts))


def show(workdir: Path, facts: Record, results: timing.Results) -> None:
    """Prints the tables, which contenders were left out and why, and where the files are."""
    console = Console(highlight=False)
    for table in benchmark_report.tables(results.records):
        console.print(table.rich())
    reasons, notes = results.lines()
    lines = [*(f"left out: {reason}" for reason in reasons), *notes, *process.warnings(facts), facts["process"]]
    for line in [*lines, f"written: {workdir}/benchmark.json, benchmark.md"]:
        console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    entry.run(main)
