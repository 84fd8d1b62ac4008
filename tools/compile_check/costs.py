"""Reads the costs of one chip from a compiled program: communication with other chips, and
estimated cycles.

A *message* is one collective operation, such as an all-reduce, by which chips exchange arrays.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from tools.compile_check.hlo import Computation, Instruction
from tools.compile_check.trip_counts import Visit

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Opcodes that move or compute numbers; the compiler may give no estimate for them.
_UNESTIMATED = "fusion gather scatter sort custom-call convolution dot reduce".split()


@dataclasses.dataclass(frozen=True)
class Collective:
    """All messages of one kind, such as all-reduce, between groups of chips of one size, in the
    entire step.
    """

    kind: str  # such as "all-gather"
    group: int  # number of chips that take part in each message
    count: float  # number of messages
    # Bytes of the complete arrays of all messages: results of an all-gather, inputs of other kinds.
    payload: float

    @property
    def sent(self) -> float:
        """Bytes that each chip sends, by the ring algorithm in a group of n chips.

        An all-gather, reduce-scatter or all-to-all sends (n−1)/n · payload, an all-reduce twice as
        much, and a collective-permute sends the payload.
        """
        if self.kind == "collective-permute":
            return self.payload
        times = 2 if self.kind == "all-reduce" else 1
        return times * (self.group - 1) / self.group * self.payload


def collectives(visits: Iterable[Visit], devices: int) -> list[Collective]:
    """All messages of a program, summed by kind and group size.

    A message without a group involves all `devices`.
    """
    messages, parts = [], dict[tuple[str, str], Collective]()
    for visit in visits:
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        cut = visit.fused and kind == "all-reduce" and _is_cut(visit.instruction, visit.computation)
        group = _group(visit.instruction, devices)
        payload = sum(shape.bytes for shape in visit.computation.inputs(visit.instruction))
        payload *= group if kind == "all-gather" else 1
        name = "reduce-scatter" if cut else kind
        message = Collective(name, group, visit.times, visit.times * payload)
        channel = visit.instruction.attribute(r"channel_id=(\d+)")
        if not visit.fused or cut or channel is None:
            messages.append(message)
        elif (kind, channel) not in parts or message.count < parts[kind, channel].count:
            # A message that overlaps with other work has its start, middle and end in several
            # fusions. Each of them states the complete message, and the middle may be in a loop.
            parts[kind, channel] = message
    sums = collections.defaultdict[tuple[str, int], list[float]](lambda: [0, 0])
    for message in [*messages, *parts.values()]:
        total = sums[message.kind, message.group]
        total[:] = total[0] + message.count, total[1] + message.payload
    return [Collective(*key, *total) for key, total in sorted(sums.items())]


def _is_cut(instruction: Instruction, computation: Computation) -> bool:
    """True if each device keeps only its slice of a result: a reduce-scatter in a fusion on TPUs."""
    all_users = computation.instructions.values()
    users = [user for user in all_users if instruction.name in user.operands]
    entries = [user for user in users if user.opcode == "get-tuple-element"]
    slices = [user for user in users if user.opcode == "dynamic-slice"]
    cut = all(_is_cut(entry, computation) for entry in entries)
    return bool(users) and cut and len(entries) + len(slices) == len(users)


def _group(instruction: Instruction, devices: int) -> int:
    """The number of chips that take part in a message. HLO has three notations for groups."""
    if group := instruction.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(group)
    if group := instruction.attribute(r"replica_groups=\{\{([\d,]+)\}"):
        return group.count(",") + 1
    mesh = re.search(r"replica_groups=\w+\[([^\]]*)\][^{]*\{([^}]*)\}", instruction.attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        named = re.findall(r"'([^']+)'(?!:\()", mesh[2])
        parts = [int(size) for size in re.findall(r":\(\d+\)(\d+)", mesh[2])]
        return math.prod([sizes[name] for name in named]) * math.prod(parts)
    return devices


def kernel_heads(visits: Iterable[Visit]) -> dict[str, float]:
    """The number of heads, of all examples, that each kernel of fused attention computes."""
    heads_of = collections.defaultdict[str, float](float)
    for visit in visits:
        name = visit.instruction.attribute(r'op_name="[^"]*?(\w+)\)*/pallas_call')
        if visit.instruction.opcode == "custom-call" and name is not None:
            batch, heads, *_ = visit.instruction.shapes[0].sizes
            heads_of[name] += visit.times * batch * heads
    return dict(heads_of)


def estimated_cycles(visits: Iterable[Visit]) -> tuple[float, dict[str, float]]:
    """Sums the compiler's `estimated_cycles` over all instructions that run, and lists what has no
    estimate.

    Returns (cycles, a dict from a name to how often it runs without an estimate). The dict has only
    instructions on arrays. The name is the opcode or, for a fusion, the compiler's name for the
    fusion.
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
            name = instruction.opcode
            if name == "fusion":
                name = re.sub(r"[.\d]+$|(\.clone)+", "", instruction.name)
            without[name] += visit.times
    return total, dict(without)
