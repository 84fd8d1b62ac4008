r"""Measures the time and memory of attention, and the time of decoding and training steps, in this
and other libraries.

python -m tools.benchmark --only=attention --lengths=512,1024,2048,4096 --workdir=runs/benchmark

The contenders are timed in turns. Writes benchmark.json (all times and their medians) and
benchmark.md into the workdir. JAX splits the heads of attention, and the batch of a training step,
over its devices. A CPU has one device for each core. The sections memory and decode use one device;
with --devices=1, all sections use one device. The PyTorch contenders need
`pip install 'cope-jax[bench]'`. Ctrl-C ends the benchmark and keeps what was measured.
"""

import dataclasses
import functools
import sys
import time
from pathlib import Path

from absl import flags
from rich.console import Console

from cope_jax.cli.common_flags import DEFINE_encoding, check_files, check_names
from cope_jax.cli.flag_values import read_names
from cope_jax.cli.run import run
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import Interrupted
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import Record
from cope_jax.storage.files import write_atomically
from cope_jax.training.preemption import GracefulStop
from tools import timing
from tools.benchmark import benchmark_report, contenders, memory_use, process
from tools.benchmark.workloads import Recipe, cores, read_problems

SECTIONS = ("attention", "memory", "decode", "train")

_ONLY = flags.DEFINE_list(
    "only", list(SECTIONS), f"Sections to measure: any of {', '.join(SECTIONS)}."
)
_LENGTHS = flags.DEFINE_list(
    "lengths", "512,1024,2048,4096", "Sequence lengths at which attention is timed."
)
_MEMORY_LENGTHS = flags.DEFINE_list(
    "memory_lengths", "2048,8192,32768", "Sequence lengths at which memory is measured."
)
_JVP = flags.DEFINE_bool(
    "jvp",
    False,
    "Whether to time jax.jvp of attention too, with tangents of queries, keys and values.",
)
_CONTEXTS = flags.DEFINE_list("contexts", "4096", "Context lengths at which decoding is timed.")
_NPOS_MAX = flags.DEFINE_list(
    "npos_max", "64", "Sizes of CoPE's position table; T means the sequence length."
)
_CONTENDERS = flags.DEFINE_string(
    "contenders",
    ",".join(contenders.DEFAULT),
    "What the sections 'attention' and 'memory' measure: names of the default list, or "
    "ENCODING/IMPLEMENTATION, such as alibi/blockwise.",
)
_ENCODINGS = flags.DEFINE_string(
    "encodings",
    "cope,rope,none",
    "Encodings that the sections 'decode' and 'train' measure. The times of the others are divided "
    "by the time of the first encoding.",
)
_RECIPES = flags.DEFINE_list(
    "recipes",
    "selective_copy:small@64,selective_copy@4,counting@4",
    "Names of configs in cope_jax/configs whose training steps are timed. NAME@BATCH sets the batch "
    "size; with NAME alone, the config sets it.",
)
_REFERENCE = flags.DEFINE_string(
    "reference",
    None,
    "Contender to compare with: the attention times of the others are divided by its time. Without "
    "this flag, it is the first of --contenders.",
)
_OF = "in the sections 'attention', 'memory' and 'decode'"
_BATCH = flags.DEFINE_integer("batch", 1, f"Batch size {_OF}.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, f"Number of attention heads {_OF}.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer(
    "head_dim", 64, f"Width of a head {_OF}; an even number.", lower_bound=2
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], f"Type of queries, keys and values {_OF}."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 7, "Rounds, each of which times every contender; the medians count.", lower_bound=1
)
_CPU_TIME = flags.DEFINE_bool(
    "cpu_time",
    False,
    "Whether to count the time that cores worked for this process, which other work on the machine "
    "changes less, instead of the time that passed.",
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    0,
    "Number of JAX devices that share the work; 0 means all (on a CPU, one per core).",
    lower_bound=0,
)
_TUNE = flags.DEFINE_bool(
    "tune",
    True,
    "Restart Python with settings for reliable times: the allocator keeps its memory, idle threads "
    "sleep, and a CPU is split into JAX devices. --notune measures without these settings.",
)
_ENCODING = DEFINE_encoding()
_WORKDIR = flags.DEFINE_string("workdir", "runs/benchmark", "Folder for the results.")


def main() -> None:
    """Runs the benchmark, and writes the report even if interrupted."""
    check_names("section of --only", _ONLY.value, SECTIONS)
    names = read_names("contenders", _CONTENDERS.value, contenders.find)
    reference = names[0] if _REFERENCE.value is None else _REFERENCE.value
    check_names("--reference", [reference], names)
    sizes = (_BATCH.value, _HEADS.value, _HEAD_DIM.value, _DTYPE.value)
    timed, weighed, decoded = (
        read_problems(flag.name, flag.value, _NPOS_MAX.value, *sizes)
        for flag in (_LENGTHS, _MEMORY_LENGTHS, _CONTEXTS)
    )
    labels = read_names("encodings", _ENCODINGS.value, EncodingConfig.parse)
    if not {"decode", "train"}.isdisjoint(_ONLY.value):
        check_files([*labels, *(name.rpartition("/")[0] for name in names)], "encodings")
    else:
        check_files([name.rpartition("/")[0] for name in names], "contenders")
    recipes = [Recipe.parse(text) for text in _RECIPES.value]
    if _TUNE.value:
        process.restart(["-m", "tools.benchmark", *sys.argv[1:]], _DEVICES.value or cores())
    devices = process.choose(_DEVICES.value)
    workdir = Path(_WORKDIR.value)
    facts, results, cases = process.facts(), timing.Results(), []
    for warning in process.warnings(facts):
        print(f"warning: {warning}", file=sys.stderr)
    if "attention" in _ONLY.value:
        split = [dataclasses.replace(problem, devices=devices, jvp=_JVP.value) for problem in timed]
        cases += contenders.attention_cases(split, names, reference)
    if "decode" in _ONLY.value:
        cases += [contenders.decoding_case(problem, labels) for problem in decoded]
    if "train" in _ONLY.value:
        cases += [contenders.training_case(recipe, labels, devices) for recipe in recipes]

    def stop() -> bool:
        return interruption.number is not None

    keep = functools.partial(write, workdir, facts, results)
    try:
        with workdirs.Workdir(workdir).locked(), GracefulStop() as interruption:
            clock = time.process_time if _CPU_TIME.value else time.perf_counter
            timing.run(cases, _ROUNDS.value, results, stop, keep, clock)
            if "memory" in _ONLY.value and not stop():
                memory_use.run(weighed, names, results, stop, keep, _ENCODING.value)
            keep()
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped at once; {workdir} has the results of the completed cases"
        ) from None
    console = Console(highlight=False)
    for table in benchmark_report.tables(results.records):
        console.print(table.rich())
    lines = [f"left out: {reason}" for reason in results.reasons()]
    lines += [*process.warnings(facts), facts["process"]]
    for line in [*lines, f"written: {workdir}/benchmark.json, benchmark.md"]:
        console.print(line, markup=False, soft_wrap=True)
    if interruption.number is not None:
        raise Interrupted(f"stopped early; {workdir} has what was measured so far")


def write(workdir: Path, facts: Record, results: timing.Results) -> None:
    """Writes the results measured so far."""
    workdirs.write_json(workdir / "benchmark.json", {"environment": facts, **vars(results)})
    text = benchmark_report.markdown(results.records, results.reasons(), facts)
    write_atomically(workdir / "benchmark.md", text)


if __name__ == "__main__":
    run(main)
