"""What a compiled step tells, as a table and as JSON."""

import math
from typing import Any

import rich.table

from experiments.compilation.step import Program, Step

FIRM = "\N{NO-BREAK SPACE}"  # between a number and its unit, where a narrow terminal would break a line


def table(step: Step) -> rich.table.Table:
    """All figures of a step."""
    shown = rich.table.Table(show_header=False, title="fits" if step.fits else "does not fit", title_justify="left")
    shown.add_column(no_wrap=True)
    shown.add_column(justify="right")
    for name, value in rows(step):
        shown.add_row(name, value)
    return shown


def rows(step: Step) -> list[tuple[str, str]]:
    """The rows of the table."""
    topology, chip = step.topology, step.topology.chip
    mesh = " × ".join(f"{axis}={size}" for axis, size in step.mesh.items() if size > 1) or "one device"
    found = [
        ("topology", f"{topology.name}, {topology.chips} chips, {len(topology.devices)} devices"),
        ("mesh", mesh),
        ("batch", f"{step.batch_size:,} × {step.length:,} tokens"),
        ("parameters", f"{step.parameters:,}"),
        ("model FLOPs of a step, by formula", number(step.flops_per_token * step.batch_size * step.length)),
    ]
    if step.program is None:
        found += [("memory of a device", size(chip.hbm_bytes)), ("the compiler", step.excess)]
    else:
        found += _memory(step, step.program) + _work(step.program) + _time(step)
    return [*found, ("compiled in", seconds(step.compile_seconds))]


def notes(step: Step) -> list[str]:
    """What the figures are made of."""
    program, chip = step.program, step.topology.chip
    if program is None:
        return []
    found = [
        "Sent: bytes that a device sends by the ring algorithm, over all turns of all loops.",
        f"Messages: sent bytes at {chip.ring_bandwidth / 1e9:g} GB/s, one after another.",
    ]
    if chip.clock is None:
        found.append(
            "Compute: the FLOPs of the matrix products at the device's peak; this compiler estimates no times."
        )
    else:
        found.append(
            f"Compute: the compiler's estimated_cycles, times the turns of loops, at {chip.clock / 1e9:g} GHz."
        )
    if program.turns:
        counted = ", ".join(f"{name} {turns:.2f}" for name, turns in program.turns.items())
        found.append(f"Loops of attention that the data end, turns for a strip of an untrained model: {counted}.")
    if program.unknown_loops:
        found.append(f"Unknown: how often {program.unknown_loops} loops turn; each counts as one turn.")
    slow = {name: times for name, times in program.cycles.without.items() if "gather" in name or "scatter" in name}
    if chip.clock is not None and slow:
        listed = ", ".join(f"{name} ({times:,.0f} times)" for name, times in slow.items())
        found.append(f"Not in the estimate, for the compiler gives none: {listed}.")
    found.append("A prediction to compare settings by, not a measurement.")
    return found


def figures(step: Step) -> dict[str, Any]:
    """The figures as JSON holds them, in bytes, seconds and FLOPs."""
    found: dict[str, Any] = {
        "topology": step.topology.name,
        "chips": step.topology.chips,
        "devices": len(step.topology.devices),
        "mesh": step.mesh,
        "batch_size": step.batch_size,
        "length": step.length,
        "parameters": step.parameters,
        "fits": step.fits,
        "excess": step.excess,
        "hbm_bytes": step.topology.chip.hbm_bytes,
        "peak_flops": step.peak_flops,
        "ring_bandwidth": step.topology.chip.ring_bandwidth,
        "model_flops": step.flops_per_token * step.batch_size * step.length,
        "compile_seconds": step.compile_seconds,
    }
    program = step.program
    if program is None:
        return found
    memory = {name: getattr(program.memory, name) for name in (*program.memory.__dataclass_fields__, "peak")}
    found |= {
        "bytes": memory,
        "flops_per_device": program.flops,
        "collectives": [
            {"kind": c.kind, "group": c.group, "count": c.count, "payload_bytes": c.payload, "sent_bytes": c.sent}
            for c in program.collectives
        ],
        "estimated_cycles": program.cycles.cycles,
        "without_estimate": program.cycles.without,
        "turns": program.turns,
        "unknown_loops": program.unknown_loops,
        "compute_seconds": step.compute_seconds,
        "collective_seconds": step.collective_seconds,
    }
    if step.step_seconds is not None:
        found |= {
            "step_seconds": list(step.step_seconds),
            "tokens_per_second": [step.tokens_per_second(s) for s in step.step_seconds],
            "mfu": [step.mfu(s) for s in step.step_seconds],
        }
    return found


def _memory(step: Step, program: Program) -> list[tuple[str, str]]:
    memory, chip = program.memory, step.topology.chip
    share = f"{memory.peak / chip.hbm_bytes:.0%} of {size(chip.hbm_bytes)}"
    return [
        ("arguments of a device", size(memory.arguments)),
        ("outputs, of which in the arguments' place", f"{size(memory.outputs)}, {size(memory.aliased)}"),
        ("temporaries", size(memory.temporaries)),
        ("program", size(memory.program)),
        ("peak, of the device's memory", f"{size(memory.peak)}, {share}"),
    ]


def _work(program: Program) -> list[tuple[str, str]]:
    found = [("FLOPs of a device, in the program", number(program.flops))]
    for c in program.collectives:
        found.append((f"{c.kind} among {c.group}", f"{c.count:,.0f} times, {size(c.sent)} sent"))
    return found


def _time(step: Step) -> list[tuple[str, str]]:
    compute, messages, both = step.compute_seconds, step.collective_seconds, step.step_seconds
    if compute is None or messages is None or both is None:
        return []
    found = [
        ("compute", seconds(compute)),
        ("messages", seconds(messages)),
        ("step, messages hidden or not", between(*(seconds(s) for s in both))),
        ("tokens/s", between(*(f"{step.tokens_per_second(s):,.0f}" for s in reversed(both)))),
    ]
    shares = [step.mfu(s) for s in reversed(both)]
    if None not in shares:
        found.append(("MFU", between(*(f"{share:.1%}" for share in shares if share is not None))))
    return found


def between(low: str, high: str) -> str:
    """A range as text; one figure where both ends read the same."""
    return low if low == high else f"{low} – {high}"


def size(count: float) -> str:
    """Bytes as text.

    >>> size(16 * 2**30).replace(FIRM, " "), size(1536).replace(FIRM, " ")
    ('16.00 GiB', '1.5 KiB')
    """
    for power, (unit, digits) in enumerate((("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2))):
        if count < 1024 ** (power + 1) or unit == "GiB":
            return f"{count / 1024**power:.{digits}f}{FIRM}{unit}"
    raise AssertionError


def number(count: float) -> str:
    """A large number as text.

    >>> number(1.25e15)
    '1.25e15'
    """
    if not count:
        return "0"
    power = math.floor(math.log10(count))
    return f"{count / 10**power:.2f}e{power}"


def seconds(count: float) -> str:
    """Seconds as text.

    >>> [seconds(count).replace(FIRM, " ") for count in (0.0123, 83.24, 6.41e-6)]
    ['12.3 ms', '83.2 s', '6.41 µs']
    """
    scale, unit = (1, "s") if count >= 1 else (1e3, "ms") if count >= 1e-3 else (1e6, "µs")
    return f"{count * scale:.3g}{FIRM}{unit}"
