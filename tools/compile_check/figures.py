"""Compiles a training step for a topology.

Shows memory, communication and times of the step as numbers and text.
"""

import re
import time
from typing import Any

import jax

from cope_jax import tasks
from cope_jax.evaluation.report.table import FIRM
from cope_jax.training import from_config
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.throughput import peak_flops
from tools.compile_check import costs, kernel_cycles
from tools.compile_check.chips import Topology
from tools.compile_check.hlo import Module
from tools.compile_check.trip_counts import count_turns, turns_of, walk

Figures = dict[str, Any]
"""Numbers by name, in bytes, seconds and FLOPs. Memory, work and time are for one device. If the
compiler ran out of memory, they are absent."""

_BYTES = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}


def compile_step(config: ExperimentConfig, topology: Topology) -> Figures:
    """Compiles the training step of an experiment for the devices of a topology.

    This is a single step; training dispatches `training.steps_per_dispatch` steps in one loop.
    Raises ConfigError for an experiment or a mesh that does not fit the devices.
    """
    task = tasks.create(config.task.name, **config.task.options)
    program = from_config.create_program(config, task, devices=topology.devices)
    model, length, chip = program.learner.model, task.length("train"), topology.chip
    batch_size = config.training.batch_size
    figures = {
        "topology": topology.name,
        "chips": len(topology.devices) // chip.devices_per_chip,
        "devices": len(topology.devices),
        "mesh": dict(program.mesh.shape),
        "batch_size": batch_size,
        "length": length,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(program.state_shapes().params)),
        "fits": False,
        "excess": "",
        "hbm_bytes": chip.hbm_bytes,
        "peak_flops": config.job.peak_flops or peak_flops(topology.devices[0].device_kind),
        "ring_bandwidth": chip.ring_bandwidth,
        "clock": chip.clock,
        "model_flops": model.flops_per_token(length) * batch_size * length,
    }
    began = time.perf_counter()
    lowered = program.lower(from_config.batch_shapes(task, batch_size))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return figures | {
            "excess": excess(str(error)),
            "compile_seconds": time.perf_counter() - began,
        }
    figures["compile_seconds"] = time.perf_counter() - began
    memory = memory_of(compiled)
    turns = count_turns(model, length)
    work = work_of(compiled.as_text() or "", turns, len(topology.devices))
    heads = work["kernel_heads"]
    # In a ring a kernel sees chunks, whose cycles are not known.
    if heads and model.layout.length is None:
        cycles = kernel_cycles.of_model(model, length, topology.name)
        work["kernel_cycles"] = (
            sum(count * cycles[name] for name, count in heads.items()) / chip.cores
        )
    return predict(
        figures
        | {"fits": memory["peak"] <= chip.hbm_bytes, "bytes": memory, "turns": turns, **work}
    )


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The bytes that a program takes on one device, by purpose. `peak` is what must fit into the
    device's memory.

    `aliased` is the part of the outputs (new state and metrics) that reuses the memory of the
    arguments (state and batches). `temporaries` are activations, gradients, and everything else
    that exists only within the step.
    """
    stats: Any = compiled.memory_analysis()
    bytes_of = {name: getattr(stats, f"{of}_size_in_bytes") for name, of in _BYTES.items()}
    bytes_of["program"] = stats.generated_code_size_in_bytes
    return bytes_of | {"peak": sum(bytes_of.values()) - 2 * bytes_of["aliased"]}


def work_of(text: str, turns: dict[str, float], devices: int) -> Figures:
    """Reads what a program does on one device from the text of the compiled program."""
    visits = list(walk(Module.parse(text), turns_of(turns)))
    cycles, without = costs.estimated_cycles(visits)
    return {
        "collectives": [
            {"kind": c.kind, "group": c.group, "count": c.count}
            | {"payload_bytes": c.payload, "sent_bytes": c.sent}
            for c in costs.collectives(visits, devices)
        ],
        "estimated_cycles": cycles,
        "kernel_heads": costs.kernel_heads(visits),
        "kernel_cycles": 0.0,
        "without_estimate": without,
        "unknown_loops": sum(visit.unknown for visit in visits),
    }


def predict(figures: Figures) -> Figures:
    """Adds the compute time, the communication time, and the step time with complete overlap and
    without overlap.

    The compute time is the compiler's cycles / clock or, if there are no cycles, the model's FLOPs
    / peak. Messages (collective operations) are sent one after another, at the bandwidth of a ring.
    MFU is 1 at the peak. Without a clock and a peak, only the communication time is known.
    """
    messages = sum(c["sent_bytes"] for c in figures["collectives"]) / figures["ring_bandwidth"]
    peak = figures["peak_flops"]
    at_peak = figures["model_flops"] / (figures["devices"] * peak) if peak else None
    cycles = figures["clock"] and figures["estimated_cycles"] + figures["kernel_cycles"]
    compute = cycles / figures["clock"] if cycles else at_peak
    figures = figures | {"compute_seconds": compute, "collective_seconds": messages}
    if compute is None:
        return figures
    steps = [max(compute, messages), compute + messages]
    tokens = figures["batch_size"] * figures["length"]
    return figures | {
        "step_seconds": steps,
        "tokens_per_second": [tokens / seconds for seconds in steps],
        "mfu": [at_peak and at_peak / seconds for seconds in steps],
    }


def excess(message: str) -> str:
    """The sentence with the numbers in a compiler's error, such as "Ran out of memory on HBM, …"."""
    sentence = re.search(
        r"((?:Ran )?out of memory[^\n]*?|Used [^\n]*?)(?:\.(?:\s|$)|\n|$)", message, re.IGNORECASE
    )
    return sentence[1] if sentence else " ".join(message.split())[:300]


def rows(figures: Figures) -> list[tuple[str, str]]:
    """The figures as rows of a table, (name, value)."""
    axes = [f"{axis}={count}" for axis, count in figures["mesh"].items() if count > 1]
    chips, devices = figures["chips"], figures["devices"]
    flops = re.sub(r"e\+0?", "e", f"{figures['model_flops']:.2e}")
    table = {
        "topology": f"{figures['topology']}, {chips} chips, {devices} devices",
        "mesh": " × ".join(axes) or "one device",
        "batch": f"{figures['batch_size']:,} × {figures['length']:,} tokens",
        "parameters": f"{figures['parameters']:,}",
        "model FLOPs of a step, by formula": flops,
    }
    hbm = size(figures["hbm_bytes"])
    if memory := figures.get("bytes"):
        shown = {name: size(count) for name, count in memory.items()}
        share = f"{memory['peak'] / figures['hbm_bytes']:.0%} of {hbm}"
        table |= {
            "arguments of a device": shown["arguments"],
            "outputs, and how much reuses arguments": f"{shown['outputs']}, {shown['aliased']}",
            "temporaries": shown["temporaries"],
            "program": shown["program"],
            "peak, and share of the memory": f"{shown['peak']}, {share}",
        }
        for c in figures["collectives"]:
            sent = f"{c['count']:,.0f} times, {size(c['sent_bytes'])} sent"
            table[f"{c['kind']} among {c['group']}"] = sent
    else:
        table |= {"memory of a device": hbm, "the compiler": figures["excess"]}
    if "step_seconds" in figures:
        tokens = (f"{count:,.0f}" for count in reversed(figures["tokens_per_second"]))
        table |= {
            "compute": seconds(figures["compute_seconds"]),
            "messages": seconds(figures["collective_seconds"]),
            "step, messages hidden or not": between(*map(seconds, figures["step_seconds"])),
            "tokens/s": between(*tokens),
        }
        if figures["peak_flops"]:
            table["MFU"] = between(*(f"{share:.1%}" for share in reversed(figures["mfu"])))
    return [*table.items(), ("compiled in", seconds(figures["compile_seconds"]))]


def notes(figures: Figures) -> list[str]:
    """Explains how the times are computed, and what is not in them."""
    if "bytes" not in figures:
        return []
    clock, kernels, loops = figures["clock"], figures["kernel_cycles"], figures["unknown_loops"]
    estimated = f"the compiler's estimated_cycles at {(clock or 0) / 1e9:g} GHz"
    share = kernels / (figures["estimated_cycles"] + kernels) if kernels else 0
    turns = "" if kernels else ", ".join(f"{n} {mean:.2f}" for n, mean in figures["turns"].items())
    without = (figures["without_estimate"] if clock else {}).items()
    slow = [
        f"{name} ({times:,.0f} times)" for name, times in without if re.search("gath|scat", name)
    ]
    sentences = {
        f"Compute: {estimated if clock else 'the FLOPs by formula at the peak'}, in all iterations "
        f"of loops. Messages: sent bytes at {figures['ring_bandwidth'] / 1e9:g} GB/s, one after "
        "another, by the ring algorithm.": True,
        f"Fused attention is {share:.0%} of the cycles: the bundles of its kernels, times the "
        "iterations of loops for random queries and keys.": kernels,
        f"Attention loops that depend on data, mean iterations in an untrained model: {turns}.": turns,
        f"Loops of unknown length: {loops}. Each counts as one iteration.": loops,
        f"Not in the estimate, because the compiler states no cycles: {', '.join(slow)}.": slow,
        "A prediction for comparing settings, not a measurement.": True,
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def between(low: str, high: str) -> str:
    """A range as text; only one number if both ends are the same text."""
    return low if low == high else f"{low} – {high}"


def size(count: float) -> str:
    """A number of bytes as text.

    >>> size(16 * 2**30).replace(FIRM, " "), size(1536).replace(FIRM, " ")
    ('16.00 GiB', '1.5 KiB')
    """
    units = (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2))
    power = next((power for power in range(3) if count < 1024 ** (power + 1)), 3)
    unit, digits = units[power]
    return f"{count / 1024**power:.{digits}f}{FIRM}{unit}"


def seconds(count: float) -> str:
    """A time as text.

    >>> [seconds(count).replace(FIRM, " ") for count in (0.0123, 83.24, 6.41e-6)]
    ['12.3 ms', '83.2 s', '6.41 µs']
    """
    scale, unit = (1, "s") if count >= 1 else (1e3, "ms") if count >= 1e-3 else (1e6, "µs")
    return f"{count * scale:.3g}{FIRM}{unit}"
