"""How often each instruction of a compiled program runs."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from experiments.compilation.hlo import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction as it runs in one place of the program.

    Attributes:
      times: how often.
      fused: it is a part of a fusion, so it has no cost of its own in the compiler's schedule.
    """

    instruction: Instruction
    computation: Computation
    times: float
    fused: bool


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A while loop, in the computation that it stands in, and the loops around that."""

    instruction: Instruction
    computation: Computation
    around: "_Loop | None"


def visits(module: Module, turns: Callable[[str], float | None]) -> Iterator[Visit]:
    """Every instruction that runs, with how often it does; all branches of a conditional count.

    Args:
      module: the program.
      turns: how often a loop turns of which the program does not say it, from the loop's name in the source, the
        `op_name` of its metadata; None: not known, then it counts as one turn.
    """
    yield from _visits(module, module[module.entry], 1.0, False, None, turns)


def unknown_loops(module: Module, turns: Callable[[str], float | None]) -> int:
    """The number of loops that count as one turn because nobody knows better."""
    unknown = 0

    def asked(name: str) -> float | None:
        nonlocal unknown
        found = turns(name)
        unknown += found is None
        return found

    for _ in visits(module, asked):
        pass
    return unknown


def _visits(
    module: Module,
    computation: Computation,
    times: float,
    fused: bool,
    around: _Loop | None,
    turns: Callable[[str], float | None],
) -> Iterator[Visit]:
    for instruction in computation:
        yield Visit(instruction, computation, times, fused)
        if instruction.opcode == "while":
            loop = _Loop(instruction, computation, around)
            count: float | None = trip_count(module, loop)
            if count is None:
                count = turns(instruction.attribute(r'op_name="([^"]*)"') or "")
            inner = times * (1 if count is None else count)
            for part in ("body", "condition"):
                yield from _visits(module, module[_called(instruction, part)], inner, fused, loop, turns)
        else:
            for name in instruction.calls():
                inside = fused or instruction.opcode == "fusion"
                yield from _visits(module, module[name], times, inside, around, turns)


def trip_count(module: Module, loop: _Loop) -> int | None:
    """The turns of a loop that counts from one constant to another; None of any other.

    XLA's own analysis stands in the text on CPUs and GPUs, but not on TPUs.
    """
    stated = loop.instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if stated is not None:
        return int(stated)
    condition = module[_called(loop.instruction, "condition")]
    body = module[_called(loop.instruction, "body")]
    test = condition[condition.root]
    direction = test.attribute(r"direction=(\w+)")
    if test.opcode != "compare" or direction is None:
        return None
    left, right = (_source(condition, name) for name in test.operands)
    if (index := _entry(condition, right)) is not None and _step(body, index):
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    index = _entry(condition, left)
    step = None if index is None else _step(body, index)
    if index is None or not step:
        return None
    first, last = _initial(module, loop, index), _constant(module, condition, right, loop)
    return None if first is None or last is None else _turns(first, last, step, direction)


def _turns(first: int, last: int, step: int, direction: str) -> int | None:
    """How often a counter that starts at `first` passes the test against `last`.

    >>> _turns(0, 5, 1, "LT"), _turns(0, 5, 2, "LE"), _turns(9, 0, -3, "GT"), _turns(0, 5, -1, "LT")
    (5, 3, 3, None)
    """
    upward = {"LT": True, "LE": True, "GT": False, "GE": False, "NE": step > 0}.get(direction)
    if upward is not (step > 0):
        return None
    way = (last - first) * (1 if upward else -1) + (direction in ("LE", "GE"))
    return max(0, -(-way // abs(step)))


def _called(instruction: Instruction, part: str) -> str:
    name = instruction.attribute(rf"\b{part}=%?([\w.\-]+)")
    if name is None:
        raise ValueError(f"the loop {instruction.name} has no {part}")
    return name


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, behind copies of it."""
    instruction = computation[name]
    while instruction.opcode in _SAME and instruction.operands:
        instruction = computation[instruction.operands[0]]
    return instruction


def _entry(computation: Computation, instruction: Instruction) -> int | None:
    """Which entry of the loop's state it is; None where it is something else."""
    if instruction.opcode != "get-tuple-element" or computation[instruction.operands[0]].opcode != "parameter":
        return None
    return int(instruction.attribute(r"index=(\d+)") or 0)


def _next(body: Computation, index: int) -> Instruction | None:
    """What the body makes of an entry of the state."""
    root = body[body.root]
    return _source(body, root.operands[index]) if root.opcode == "tuple" else None


def _step(body: Computation, index: int) -> int | None:
    """What each turn adds to an entry of the state, 0 where it stays as it is; None where that is not constant."""
    found = _next(body, index)
    if found is None:
        return None
    if _entry(body, found) == index:
        return 0
    if found.opcode not in ("add", "subtract"):
        return None
    left, right = (_source(body, name) for name in found.operands)
    if found.opcode == "add" and _entry(body, right) == index:
        left, right = right, left
    if _entry(body, left) != index or right.opcode != "constant":
        return None
    return _number(right, -1 if found.opcode == "subtract" else 1)


def _initial(module: Module, loop: _Loop, index: int) -> int | None:
    """The value of an entry of the state before the loop."""
    state = _source(loop.computation, loop.instruction.operands[0])
    if state.opcode != "tuple":
        return None
    return _constant(module, loop.computation, _source(loop.computation, state.operands[index]), loop.around)


def _constant(module: Module, computation: Computation, value: Instruction, loop: _Loop | None) -> int | None:
    """The number that a value is, also where it comes into the loop around as a part of a state that never changes."""
    if value.opcode == "constant":
        return _number(value)
    index = _entry(computation, value)
    if index is None or loop is None:
        return None
    if _step(module[_called(loop.instruction, "body")], index) != 0:
        return None
    return _initial(module, loop, index)


def _number(constant: Instruction, sign: int = 1) -> int | None:
    text = re.fullmatch(r"\s*(-?\d+)\s*", constant.arguments)
    return sign * int(text[1]) if text else None
