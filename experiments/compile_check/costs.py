"""What a compiled program does on one chip: messages between chips, and the compiler's estimate of its work."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from experiments.compile_check.hlo import Computation, Instruction
from experiments.compile_check.trip_counts import Visit

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Opcodes that move or compute numbers; the compiler may give no estimate for them.
_UNESTIMATED = ("fusion", "gather", "scatter", "sort", "custom-call", "convolution", "dot", "reduce")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of message between chips, over the entire step."""

    kind: str  # as "all-gather"
    group: int  # chips that take part in each
    count: float  # how often it runs
    payload: float  # bytes of the complete array, over all runs: the result of an all-gather, the input of others

    @property
    def sent(self) -> float:
        """Bytes that each chip sends, by the ring algorithm.

        all-gather, reduce-scatter, all-to-all: (n−1)/n · payload; all-reduce: twice that; permute: payload.
        """
        if self.kind == "collective-permute":
            return self.payload
        return (2 if self.kind == "all-reduce" else 1) * (self.group - 1) / self.group * self.payload


def collectives(visits: Iterable[Visit], devices: int) -> list[Collective]:
    """All messages of a program, summed by kind and size of group; a message without a group is among all `devices`."""
    messages, parts = [], dict[tuple[str, str], Collective]()
    for visit in visits:
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        scatters = visit.fused and kind == "all-reduce" and _is_cut(visit.instruction, visit.computation)
        group = _group(visit.instruction, devices)
        payload = sum(shape.bytes for shape in visit.computation.inputs(visit.instruction))
        payload *= group if kind == "all-gather" else 1
        message = Collective("reduce-scatter" if scatters else kind, group, visit.times, visit.times * payload)
        channel = visit.instruction.attribute(r"channel_id=(\d+)")
        if not visit.fused or scatters or channel is None:
            messages.append(message)
        elif (kind, channel) not in parts or message.count < parts[kind, channel].count:
            # A part of a message that overlaps with other work: its start, middle and end are in several fusions, each
            # with the complete message, and the middle may be in a loop.
            parts[kind, channel] = message
    messages += parts.values()
    return [
        Collective(kind, group, sum(m.count for m in own), sum(m.payload for m in own))
        for kind, group in sorted({(m.kind, m.group) for m in messages})
        if (own := [m for m in messages if (m.kind, m.group) == (kind, group)])
    ]


def _is_cut(instruction: Instruction, computation: Computation) -> bool:
    """Whether each device keeps only its own slice of a result; in a fusion, that is a reduce-scatter on TPUs."""
    users = [user for user in computation.instructions.values() if instruction.name in user.operands]
    return bool(users) and all(
        user.opcode == "dynamic-slice" or (user.opcode == "get-tuple-element" and _is_cut(user, computation))
        for user in users
    )


def _group(instruction: Instruction, devices: int) -> int:
    """How many chips take part, from any of the three ways in which groups are written."""
    if found := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(found)
    if found := instruction.attribute(r"replica_groups=\{\{([\d,]+)\}"):
        return found.count(",") + 1
    mesh = re.search(r"replica_groups=\w+\[([^\]]*)\][^{]*\{([^}]*)\}", instruction.attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        named = re.findall(r"'([^']+)'(?!:\()", mesh[2])
        parts = [int(size) for size in re.findall(r":\(\d+\)(\d+)", mesh[2])]
        return math.prod([sizes[name] for name in named]) * math.prod(parts)
    return devices


def estimated_cycles(visits: Iterable[Visit]) -> tuple[float, dict[str, float]]:
    """The sum of the compiler's `estimated_cycles`, times how often each instruction runs, and those without estimate.

    The latter are counts of instructions on arrays, by opcode, or by the name that the compiler chose for a fusion.
    """
    total, without = 0.0, collections.defaultdict[str, float](float)
    for visit in visits:
        instruction = visit.instruction
        stated = instruction.attribute(r'"estimated_cycles":"(\d+)"')
        if visit.fused:
            continue
        if stated is not None:
            total += visit.times * int(stated)
        elif instruction.opcode in _UNESTIMATED:
            fusion = instruction.opcode == "fusion"
            name = re.sub(r"[.\d]+$|(\.clone)+", "", instruction.name) if fusion else instruction.opcode
            without[name] += visit.times
    return total, dict(without)
