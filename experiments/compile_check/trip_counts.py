"""Counts how often each instruction of a compiled program runs, and the data-dependent turns of attention loops."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.attention import attend, choose
from cope_jax.models.decoder import DecoderConfig
from experiments.compile_check.hlo import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier")
LOOPS = ("diagonal", "interior", "boundary")
"""The names of the loops of `cope_jax.attention.streaming_softmax.over_blocks`, in the order in which they run."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction as it runs in one place of the program."""

    instruction: Instruction
    computation: Computation
    times: float  # how often
    fused: bool  # it is a part of a fusion, so it has no cost of its own in the compiler's schedule
    around: "Visit | None"  # the innermost loop around it
    unknown: bool = False  # it is a loop that counts as one turn because its number of turns is unknown


def walk(module: Module, turns: Callable[[str], float | None]) -> Iterator[Visit]:
    """Every instruction that runs, and how often; all branches of a conditional count.

    `turns` gives the turns of a loop for which the program does not state them, from the loop's name in the source, the
    `op_name` of its metadata. If it returns None, the loop counts as one turn.
    """

    def within(computation: Computation, times: float, fused: bool, around: Visit | None) -> Iterator[Visit]:
        for instruction in computation.instructions.values():
            visit = Visit(instruction, computation, times, fused, around)
            if instruction.opcode != "while":
                yield visit
                for name in instruction.calls():
                    yield from within(module[name], times, fused or instruction.opcode == "fusion", around)
                continue
            count = trip_count(module, visit)
            told = turns(instruction.attribute(r'op_name="([^"]*)"') or "") if count is None else float(count)
            yield dataclasses.replace(visit, unknown=told is None)
            of_parts = times if told is None else times * told
            for part in ("body", "condition"):
                yield from within(module[_called(instruction, part)], of_parts, fused, visit)

    yield from within(module[module.entry], 1.0, False, None)


def turns_of(counted: Mapping[str, float]) -> Callable[[str], float | None]:
    """The argument `turns` of `walk`: gives the turns of a loop by its name in the source, "…/body/diagonal/while"."""
    return lambda name: next(
        (turns for loop, turns in counted.items() if re.search(rf"\b{loop}\b[^/]*/while[^/]*$", name)), None
    )


def count_turns(model: DecoderConfig, length: int) -> dict[str, float]:
    """The mean number of turns for a block of queries, by the loop's name, of an untrained model.

    Attention runs on one example with normally distributed queries and keys, so about half of all gates are open. If
    only positions decide where an encoding's loops end, it has exactly these turns with any data. Empty if attention
    has no such loops, or is split along the sequence, because each device then has its own loops.
    """
    block = model.block
    shape = block.attention_shape(model.max_length)
    q_key, k_key, init_key = jax.random.split(jax.random.key(0), 3)
    q_BLHK = jax.random.normal(q_key, (1, length, shape.num_heads, shape.head_dim))
    k_BMGK = jax.random.normal(k_key, (1, length, shape.kv_heads, shape.head_dim))
    name = choose(q_BLHK, k_BMGK, model.layout.length) if block.attention == "auto" else block.attention
    if name != "blockwise":
        return {}
    encoding = model.encoding.build(shape, rngs=nnx.Rngs(init_key))
    features, _ = encoding.features(jnp.zeros((1, length, block.model_dim)), q_BLHK, k_BMGK, k_BMGK, None)
    options: Any = {"implementation": name, "features": features, "embedded": True, "blocks": block.attention_blocks}
    starts, turns = collections.Counter[int](), collections.Counter[int]()
    while_loop, numbers = jax.lax.while_loop, itertools.count()

    def counted(condition: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
        number = next(numbers)

        def turn(state: Any) -> Any:
            jax.debug.callback(lambda: turns.update([number]))
            return body(state)

        jax.debug.callback(lambda: starts.update([number]))
        return while_loop(condition, turn, state)

    # Counts in the loops themselves, because only the encoding and attention know what decides their turns.
    with mock.patch.object(jax.lax, "while_loop", counted):
        lowered = jax.jit(lambda: attend(q_BLHK, k_BMGK, k_BMGK, encoding=encoding, **options)).lower()
    if next(numbers) != len(LOOPS):
        return {}
    jax.block_until_ready(lowered.compile()())
    jax.effects_barrier()
    return {loop: turns[number] / starts[number] for number, loop in enumerate(LOOPS)}


def trip_count(module: Module, loop: Visit) -> int | None:
    """The turns of a loop that counts upward from one constant to below another; None for any other loop.

    The text has XLA's own analysis on CPUs and GPUs, but not on TPUs.
    """
    stated = loop.instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if stated is not None:
        return int(stated)
    condition = module[_called(loop.instruction, "condition")]
    test = condition[condition.root]
    upward = {"LT": 1, "GT": -1}.get(test.attribute(r"direction=(\w+)") or "")
    if test.opcode != "compare" or upward is None:
        return None
    counter, limit = (_source(condition, name) for name in test.operands[::upward])
    index = _entry(condition, counter)
    step = None if index is None else _step(module[_called(loop.instruction, "body")], index)
    if index is None or step is None or step < 1:
        return None
    first, last = _initial(module, loop, index), _constant(module, condition, limit, loop)
    return None if first is None or last is None else max(0, -(-(last - first) // step))


def _called(instruction: Instruction, part: str) -> str:
    return instruction.attribute(rf"\b{part}=%?([\w.\-]+)") or ""


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, without copies of it."""
    instruction = computation[name]
    while instruction.opcode in _SAME and instruction.operands:
        instruction = computation[instruction.operands[0]]
    return instruction


def _entry(computation: Computation, instruction: Instruction) -> int | None:
    """Which entry of the loop's state it is; None if it is something else."""
    if instruction.opcode != "get-tuple-element" or computation[instruction.operands[0]].opcode != "parameter":
        return None
    return int(instruction.attribute(r"index=(\d+)") or 0)


def _step(body: Computation, index: int) -> int | None:
    """What each turn adds to an entry of the state, 0 if the entry does not change; None if that is not constant."""
    root = body[body.root]
    if root.opcode != "tuple":
        return None
    found = _source(body, root.operands[index])
    if _entry(body, found) == index:
        return 0
    if found.opcode != "add":
        return None
    terms = [_source(body, name) for name in found.operands]
    own = [term for term in terms if _entry(body, term) == index]
    constants = [term for term in terms if term.opcode == "constant"]
    return _number(constants[0]) if len(own) == len(constants) == 1 else None


def _initial(module: Module, loop: Visit, index: int) -> int | None:
    """The value of an entry of the state before the loop."""
    state = _source(loop.computation, loop.instruction.operands[0])
    if state.opcode != "tuple":
        return None
    return _constant(module, loop.computation, _source(loop.computation, state.operands[index]), loop.around)


def _constant(module: Module, computation: Computation, value: Instruction, loop: Visit | None) -> int | None:
    """The constant number of a value, also if it enters the loop around it as a part of a state that never changes."""
    if value.opcode == "constant":
        return _number(value)
    index = _entry(computation, value)
    if index is None or loop is None or _step(module[_called(loop.instruction, "body")], index) != 0:
        return None
    return _initial(module, loop, index)


def _number(constant: Instruction) -> int | None:
    text = re.fullmatch(r"\s*(-?\d+)\s*", constant.arguments)
    return int(text[1]) if text else None
