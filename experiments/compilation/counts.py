"""What a compiled program does on one chip: arithmetic, messages between chips, and the compiler's own estimate."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

from experiments.compilation.hlo import Computation, Instruction, Shape
from experiments.compilation.loops import Visit

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# What moves or makes numbers without the compiler saying how long it takes.
_UNESTIMATED = ("fusion", "gather", "scatter", "sort", "custom-call", "convolution", "dot", "reduce")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of message between chips, over the whole step.

    Attributes:
      kind: as "all-gather".
      group: chips that take part in each.
      count: how often it runs.
      payload: bytes of the whole array, summed over all runs: what an all-gather ends with, a reduce-scatter begins
        with, the others begin and end with.
    """

    kind: str
    group: int
    count: float
    payload: float

    @property
    def sent(self) -> float:
        """Bytes that each chip sends, by the ring algorithm.

            all-gather, reduce-scatter, all-to-all: (n−1)/n · payload; all-reduce: twice that; permute: payload.

        >>> Collective("all-reduce", 4, 1, 1000).sent
        1500.0
        """
        if self.kind == "collective-permute":
            return self.payload
        return (2 if self.kind == "all-reduce" else 1) * (self.group - 1) / self.group * self.payload


def collectives(visits: Iterable[Visit], devices: int) -> list[Collective]:
    """All messages of a program, summed by kind and size of group.

    Args:
      visits: from `experiments.compilation.loops.visits`.
      devices: of the program, the group where none is named.
    """
    messages, parts = [], dict[tuple[str, str], Collective]()
    for visit in visits:
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        scatters = visit.fused and kind == "all-reduce" and _is_cut(visit.instruction, visit.computation)
        message = _message("reduce-scatter" if scatters else kind, visit, devices)
        channel = visit.instruction.attribute(r"channel_id=(\d+)")
        if not visit.fused or scatters or channel is None:
            messages.append(message)
        elif (kind, channel) not in parts or message.count < parts[kind, channel].count:
            # A part of a message that runs beside other work: its start, its end and what is between stand in several
            # fusions, each with the whole message, and what is between may be in a loop.
            parts[kind, channel] = message
    found: dict[tuple[str, int], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for message in (*messages, *parts.values()):
        total = found[message.kind, message.group]
        total[0] += message.count
        total[1] += message.payload
    return [Collective(*key, *total) for key, total in sorted(found.items())]


def _message(kind: str, visit: Visit, devices: int) -> Collective:
    group = _group(visit.instruction, devices)
    payload = sum(shape.bytes for shape in visit.computation.inputs(visit.instruction))
    return Collective(kind, group, visit.times, visit.times * payload * (group if kind == "all-gather" else 1))


def _is_cut(instruction: Instruction, computation: Computation) -> bool:
    """Whether each device keeps only its own slice of a result; so, in a fusion, TPUs write a reduce-scatter."""
    users = [user for user in computation if instruction.name in user.operands]
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


def flops(visits: Iterable[Visit]) -> float:
    """Floating-point operations of all matrix products, two for each multiplication and addition."""
    return sum(visit.times * _flops(visit.computation, visit.instruction) for visit in visits)


def _flops(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        left = computation.inputs(instruction)[0]
        summed = _numbers(instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2.0 * instruction.shapes[0].size * math.prod(left.sizes[axis] for axis in summed)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, *computation.inputs(instruction)[:2])
    return 0.0


def _convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> float:
    """FLOPs of a convolution, for as such TPUs write matrix products: batches become windows that pad and dilate.

    Only places of a window count that meet an entry of the input, not padding, nor the gaps of a dilation.
    """
    labels = instruction.attribute(r"dim_labels=([\w?]+)_") or ""
    kernel = instruction.attribute(r"dim_labels=\w+_(\w+)->") or ""
    result = instruction.attribute(r"dim_labels=[\w]+_\w+->(\w+)") or ""
    out = instruction.shapes[0]
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    pairs = out.sizes[result.index("b")] * out.sizes[result.index("f")] * right.sizes[kernel.index("i")] / groups
    axes = [letter for letter in kernel if letter.isdigit()]
    window = {name: _window(instruction, name, len(axes)) for name in ("stride", "lhs_dilate", "rhs_dilate")}
    pads = (instruction.attribute(r"window=\{[^}]*\bpad=([\d_x\-]+)") or "x".join(["0_0"] * len(axes))).split("x")
    met = 1.0
    for axis, letter in enumerate(sorted(axes)):
        met *= _meetings(
            left.sizes[labels.index(letter)],
            right.sizes[kernel.index(letter)],
            out.sizes[result.index(letter)],
            int(pads[axis].split("_")[0]),
            window["stride"][axis],
            window["lhs_dilate"][axis],
            window["rhs_dilate"][axis],
        )
    return 2.0 * pairs * met


def _meetings(inputs: int, kernel: int, outputs: int, pad: int, stride: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """How many pairs of a place of the output and a place of the kernel meet an entry of the input.

    >>> _meetings(inputs=8, kernel=8, outputs=8, pad=0, stride=7, lhs_dilate=8, rhs_dilate=1)
    8
    """
    met = 0
    for place in range(kernel):
        offset = place * rhs_dilate - pad
        if lhs_dilate == 1:  # offset + stride · o in [0, inputs)
            first = max(0, -(offset // stride))
            met += max(0, min(outputs, (inputs - 1 - offset) // stride + 1) - first)
        else:
            met += sum(
                at % lhs_dilate == 0 and 0 <= at // lhs_dilate < inputs
                for at in range(offset, offset + outputs * stride, stride)
            )
    return met


def _window(instruction: Instruction, name: str, axes: int) -> list[int]:
    text = instruction.attribute(rf"window=\{{[^}}]*\b{name}=([\dx]+)")
    return [int(number) for number in text.split("x")] if text else [1] * axes


def _numbers(instruction: Instruction, pattern: str) -> list[int]:
    return [int(number) for number in (instruction.attribute(pattern) or "").split(",") if number]


@dataclasses.dataclass(frozen=True)
class Cycles:
    """The compiler's estimate.

    Attributes:
      cycles: of the core's clock, of all instructions for which the compiler states `estimated_cycles`.
      without: how many instructions that work on arrays run without such a statement, by opcode.
    """

    cycles: float
    without: dict[str, float]


def estimated_cycles(visits: Iterable[Visit]) -> Cycles:
    """The compiler's `estimated_cycles`, each times how often its instruction runs."""
    total, without = 0.0, collections.defaultdict[str, float](float)
    for visit in visits:
        stated = visit.instruction.attribute(r'"estimated_cycles":"(\d+)"')
        if stated is not None and not visit.fused:
            total += visit.times * int(stated)
        elif visit.instruction.opcode in _UNESTIMATED and not visit.fused:
            without[_name(visit.instruction)] += visit.times
    return Cycles(total, dict(without))


def _name(instruction: Instruction) -> str:
    """Its opcode; of a fusion, the part of its name that the compiler chose for what is in it."""
    return re.sub(r"[.\d]+$|(\.clone)+", "", instruction.name) if instruction.opcode == "fusion" else instruction.opcode
