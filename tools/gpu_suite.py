r"""Checks and measures everything on one GPU, in a given time: correctness, benchmarks, prefill,
and training.

python -m tools.gpu_suite --minutes=9 --workdir=runs/gpu_suite

Sections, in this order:
  correctness  every encoding: blockwise and fused attention against full attention, values and gradients.
  benchmark    attention, decoding and training steps, with `tools.benchmark`.
  prefill      tokens per second of a model of 1.3 billion parameters, as in Table 1 of arXiv 2609.34556.
  train        the recipes for flip-flop, selective copy and counting of the CoPE paper, for the time that is left.

A section that reaches its share of the time is stopped; what it measured until then stays. Training
that is stopped resumes with `cope-jax compare` and the folder in train/. Everything lies in the
workdir; summary.md lists it.
"""

import collections
import dataclasses
import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from cope_jax import encodings, models
from cope_jax.attention import Reason, attend, fused, prepare
from cope_jax.cli.common_flags import check_names
from cope_jax.cli.run import run
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, first_line
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import DecoderConfig
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import Record, environment
from cope_jax.storage.files import write_atomically
from tools import timing

SECTIONS = {"correctness": 0.2, "benchmark": 0.4, "prefill": 0.15, "train": 1.0}
"""The sections, and the share of the remaining time that each may take."""
FIRST = ("cope", "rope", "cope(gate=separate_key)", "cope(gate=value,position=slope)+rope")
"""Encodings that are checked first, with all masks; of the others only the defaults are."""
MASKS = ("causal", "packed", "two_sided")
GRACE = 20.0  # seconds between asking a command to stop and killing it
TOLERANCE = {"float32": 2e-4, "bfloat16": 3e-2}  # of the largest entry, see `check_encoding`
ROUNDING = 0.1  # the same for full attention in bfloat16 against float32

_MINUTES = flags.DEFINE_float("minutes", 9.0, "Time for all sections, in minutes.", lower_bound=0.1)
_ONLY = flags.DEFINE_list("only", list(SECTIONS), f"Sections to run: any of {', '.join(SECTIONS)}.")
_TOY = flags.DEFINE_bool("toy", False, "Use tiny sizes, to try the suite on a CPU.")
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/gpu_suite", "Folder for everything that the suite writes."
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the problems of the sections."""

    length: int = 333  # of correctness; no multiple of a block's size
    width: int = 64  # of a head, in correctness
    lengths: str = "1024,4096,16384,65536"  # of the benchmark
    recipes: str = "selective_copy,counting"  # of the benchmark
    rounds: int = 3
    layers: int = 25  # of the model for prefill, with heads of 128
    model_dim: int = 2048
    prompt: int = 4096
    trained: tuple[str, ...] = ("flip_flop", "selective_copy", "counting")
    training: tuple[str, ...] = ()  # more flags


TOY = Sizes(
    *(83, 16, "64", "quick@2", 1, 1, 128, 64, ("quick",)),
    training=(
        "--config.job.mesh.data=1",
        "--config.training.steps=10",
        "--config.training.batch_size=2",
        "--config.optimizer.warmup_steps=1",
    ),
)


def main() -> None:
    """Runs the sections, and writes summary.md after each one."""
    check_names("section of --only", _ONLY.value, SECTIONS)
    if not _ONLY.value or not math.isfinite(_MINUTES.value):
        raise ConfigError("give --only at least one section, and --minutes a number of minutes")
    # The commands of later sections need the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    workdir, sizes = Path(_WORKDIR.value), TOY if _TOY.value else Sizes()
    end = time.monotonic() + 60 * _MINUTES.value
    rows: list[Record] = []
    with workdirs.Workdir(workdir).locked():
        for name in (name for name in SECTIONS if name in _ONLY.value):
            began = time.monotonic()
            print(f"{name}: {max(0.0, end - began) / 60:.1f} minutes left", file=sys.stderr)
            result = RUN[name](workdir, sizes, began + SECTIONS[name] * (end - began))
            seconds = round(time.monotonic() - began)
            rows.append({"section": name, "result": result, "seconds": seconds})
            write(workdir / "summary.json", "sections", rows)
            device = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
            lines = [f"- {row['section']}: {row['result']} ({row['seconds']} s)" for row in rows]
            write_atomically(workdir / "summary.md", "\n".join([f"# {device}", "", *lines, ""]))
    print((workdir / "summary.md").read_text(), end="")


def write(path: Path, name: str, rows: list[Record]) -> None:
    """Writes records, and the environment in which they were measured."""
    workdirs.write_json(path, {name: rows, "environment": environment()})


def check_encodings(workdir: Path, sizes: Sizes, end: float) -> str:
    """Compares the implementations of every encoding with full attention.

    Returns a summary in one line.
    """
    records: list[Record] = []
    failed, refused = [], collections.defaultdict[str, dict[str, None]](dict)
    others = [name for name in encodings.names() if name not in FIRST]
    cases = [
        *itertools.product(FIRST, TOLERANCE, MASKS),
        *itertools.product(others, TOLERANCE, MASKS[:1]),
    ]
    for number, (spec, dtype, mask) in enumerate(cases):
        if time.monotonic() > end:
            left = f"{len(cases) - number} of {len(cases)} cases were not checked"
            failed.append(f"stopped at its time: {left}")
            break
        try:
            records += check_encoding(spec, dtype, mask, sizes)
        except Exception as error:  # the other encodings still count
            failed.append(f"{spec} ({mask}) in {dtype} failed ({first_line(error)})")
        write(workdir / "correctness.json", "records", records)
    compared, differ = 0, []
    for record in records:
        if "reason" in record:
            refused[record["reason"]][record["encoding"]] = None
            continue
        compared += 1
        exact = record["implementation"] == "full"
        if not record["error"] <= (ROUNDING if exact else TOLERANCE[record["dtype"]]):
            name = f"{record['encoding']}/{record['implementation']} ({record['mask']})"
            differ.append(f"{name} in {record['dtype']} differs by {record['error']:.1e}")
    without = [
        f"no kernels for {', '.join(specs)}, because {why}" for why, specs in refused.items()
    ]
    agree = f"{compared - len(differ)} of {compared} comparisons agree"
    return "; ".join([agree, *differ, *failed, *without])


def check_encoding(spec: str, dtype: str, mask: str, sizes: Sizes) -> list[Record]:
    """The largest difference of the output and all gradients from full attention, for each
    implementation.

    Full attention computes in the same type, because rounded features of tokens change the result
    more than any kernel: gate keys in bfloat16 move the sums of CoPE's gates. In bfloat16 it is
    itself compared with float32 from the same rounded features. A difference is divided by the
    largest entry of the array. The gradients of all parameters share one largest entry, because
    some of them are sums that cancel, down to 0.
    """
    heads, groups, length, width = 4, 2, sizes.length, sizes.width
    shape = {"num_heads": heads, "num_kv_heads": groups, "head_dim": width, "max_length": length}
    encoding = encodings.create(spec, **shape, rngs=nnx.Rngs(0))
    graph, initial = nnx.split(encoding)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.1 * jnp.asarray(rng.normal(size=x.shape), x.dtype), initial
    )
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(2, length, n, width)), dtype)
        for n in (heads, groups, groups, heads)
    )
    x = jnp.asarray(rng.normal(size=(2, length, encoding.shape.width)), dtype)
    documents = jnp.asarray(np.arange(length) * 3 // length)[None].repeat(2, axis=0)
    packed = {"q_segment_ids": documents, "k_segment_ids": documents, "window": length // 5}
    masks: dict[str, dict[str, Any]]
    masks = {"causal": {}, "packed": packed, "two_sided": {"causal": False}}
    masked: dict[str, Any] = {"embedded": True, **masks[mask]}

    @functools.partial(jax.jit, static_argnames=("implementation", "exact"))
    def run(implementation: str, arguments: Any, exact: bool = False) -> Any:
        def out(params: Any, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if exact:  # x stays, and so do features of tokens
                q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
            encoding = nnx.merge(graph, params)
            return attend(q, k, v, encoding=encoding, x=x, implementation=implementation, **masked)

        value, pull = jax.vjp(out, *arguments)
        return value, pull(dout.astype(value.dtype))

    case = {"encoding": spec, "mask": mask, "dtype": dtype}
    records: list[Record] = []
    with jax.default_matmul_precision("highest"):
        arguments = params, x, q, k, v
        reference = run("full", arguments)
        results = (
            {"blockwise": run("blockwise", arguments)} if encoding.traits.splits_queries else {}
        )
        plan = fused.plan(encoding, prepare(q, k, v, encoding=encoding, x=x, **masked))
        if isinstance(plan, Reason):
            records.append({**case, "implementation": "fused", "reason": plan.why})
        else:
            results["fused"] = run("fused", arguments)
        errors = {name: _error(result, reference) for name, result in results.items()}
        if dtype == "bfloat16":
            errors["full"] = _error(reference, run("full", arguments, exact=True))
    return records + [{**case, "implementation": n, "error": e} for n, e in errors.items()]


def _error(result: Any, reference: Any) -> float:
    """The largest relative difference of the output, of the gradient of each input, and of those of
    all parameters.
    """
    errors = []
    (out, (dparams, *dinputs)), (exact_out, (exact_dparams, *exact_dinputs)) = result, reference
    pairs = zip((out, dparams, *dinputs), (exact_out, exact_dparams, *exact_dinputs), strict=True)
    for pair in pairs:
        some, exact = ([a.astype(jnp.float32) for a in jax.tree.leaves(tree)] for tree in pair)
        largest = max((float(jnp.abs(e).max()) for e in exact), default=0.0) or 1.0
        errors += [float(jnp.abs(a - e).max()) / largest for a, e in zip(some, exact, strict=True)]
    return float(np.max(errors))  # not a number, if one of them is not


def benchmark(workdir: Path, sizes: Sizes, end: float) -> str:
    """Runs `tools.benchmark`: attention and decoding, then training steps."""
    contenders = "rope/cudnn,rope/jax.nn,rope/blockwise,rope/fused,cope/blockwise,cope/fused"
    attention = [f"--lengths={sizes.lengths}", f"--contexts={sizes.lengths}", "--dtype=bfloat16"]
    attention += [f"--contenders={contenders}", "--only=attention,decode"]
    parts = {"attention": attention, "train": ["--only=train", f"--recipes={sizes.recipes}"]}
    common = ["--encodings=cope,rope", f"--rounds={sizes.rounds}", "--notune"]
    results = []
    for name, chosen in parts.items():
        folder = f"--workdir={workdir / 'benchmark' / name}"
        results.append(f"{name} {command('tools.benchmark', [*chosen, *common, folder], end)}")
    return ", ".join(results)


def prefill(workdir: Path, sizes: Sizes, end: float) -> str:
    """Measures how many tokens of a prompt a large model reads in a second, for several encodings."""
    records: list[Record] = []
    results = []
    for spec, attention in itertools.product(("cope", "rope", "none"), ("blockwise", "fused")):
        record: Record = {"encoding": spec, "attention": attention, "seconds": []}
        record["tokens_per_second"], text = None, "left out"
        if time.monotonic() < end:
            try:
                record["seconds"] = seconds = prefill_seconds(spec, attention, sizes, end)
                record["tokens_per_second"] = speed = sizes.prompt / min(seconds)
                text = f"{speed / 1000:.1f} thousand tokens/s ({len(seconds)} runs)"
            except Exception as error:  # the others still count
                record["reason"] = first_line(error)
                text = f"failed ({record['reason']})"
        records.append(record)
        results.append(f"{spec}/{attention} {text}")
        write(workdir / "prefill.json", "records", records)
    return ", ".join(results)


def prefill_seconds(spec: str, attention: str, sizes: Sizes, end: float) -> list[float]:
    """Times up to five prompts, and no further ones after the time `end`."""
    width = sizes.model_dim
    block = BlockConfig(width, width // 128, compute_dtype="bfloat16", attention=attention)
    config = DecoderConfig(
        vocab_size=1024,
        max_length=sizes.prompt,
        num_layers=sizes.layers,
        encoding=EncodingConfig.parse(spec),
        block=block,
    )
    graph, params = nnx.split(models.create("decoder", config, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (1, sizes.prompt)), jnp.int32)
    read = jax.jit(
        lambda params, tokens: nnx.merge(graph, params).prefill(tokens, tokens.shape[1])[0]
    )

    def task() -> None:
        jax.block_until_ready(read(params, tokens))

    task()  # compiles
    seconds: list[float] = []
    for seconds_of_round in timing.interleave({spec: task}, rounds=5):
        seconds.append(seconds_of_round[spec])
        if time.monotonic() > end:
            break
    return seconds


def train(workdir: Path, sizes: Sizes, end: float) -> str:
    """Trains the paper's recipes, each for an equal share of the time that is left."""
    results = []
    for number, recipe in enumerate(sizes.trained):
        now = time.monotonic()
        share = now + (end - now) / (len(sizes.trained) - number)
        given = [f"--config={recipe}", "--encodings=cope,rope", "--seeds=1", *sizes.training]
        folder = f"--workdir={workdir / 'train' / recipe}"
        results.append(f"{recipe} {command('cope_jax compare', [*given, folder], share)}")
    return ", ".join(results)


def command(name: str, arguments: Sequence[str], end: float) -> str:
    """Runs a command until the time `end`. Returns how it ended, in a word or two."""
    seconds = end - time.monotonic()
    if seconds < GRACE / 2:
        return "left out"
    process = subprocess.Popen([sys.executable, "-m", *name.split(), *arguments])
    try:
        status = process.wait(seconds)
        return "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return "stopped"
    except BaseException:
        process.terminate()
        process.wait()
        raise


RUN: dict[str, Callable[[Path, Sizes, float], str]] = {
    "correctness": check_encodings,
    "benchmark": benchmark,
    "prefill": prefill,
    "train": train,
}

if __name__ == "__main__":
    run(main)
