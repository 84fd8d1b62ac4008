"""Counts how often each instruction of a compiled program runs, even in attention loops whose ends
depend on data.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.attention import BlockSizes, attend, placement
from cope_jax.attention.attend import automatic
from cope_jax.attention.fused import CPU
from cope_jax.encodings import AttentionShape, Encoding, Tokens
from cope_jax.models.decoder import DecoderConfig
from tools.compile_check.hlo import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier")
LOOPS = ("diagonal", "interior", "boundary")
"""The names of the loops of `cope_jax.attention.streaming_softmax.over_blocks`, in the order in
which they run.
"""


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction at one place of the program, and how often it runs there."""

    instruction: Instruction
    computation: Computation
    times: float  # how often it runs
    # Whether it is a part of a fusion, without a separate cost in the compiler's schedule.
    fused: bool
    around: "Visit | None"  # the innermost loop around it
    # Whether it is a loop of an unknown number of iterations, which counts as one iteration.
    unknown: bool = False


def walk(module: Module, turns: Callable[[str], float | None]) -> Iterator[Visit]:
    """Yields every instruction that runs, and how often it runs. All branches of a conditional
    count.

    If the program does not state the number of iterations of a loop, `turns` gives this number. The
    argument of `turns` is the loop's name in the source, which is `op_name` in the loop's metadata.
    If `turns` returns None, the loop counts as one iteration.
    """

    def within(
        computation: Computation, times: float, fused: bool, around: Visit | None
    ) -> Iterator[Visit]:
        for instruction in computation.instructions.values():
            visit = Visit(instruction, computation, times, fused, around)
            if instruction.opcode != "while":
                yield visit
                inner = fused or instruction.opcode == "fusion"
                for name in instruction.calls():
                    yield from within(module[name], times, inner, around)
                continue
            count: float | None = trip_count(module, visit)
            if count is None:
                count = turns(instruction.attribute(r'op_name="([^"]*)"') or "")
            yield dataclasses.replace(visit, unknown=count is None)
            of_parts = times * (1.0 if count is None else count)
            for role in ("body", "condition"):
                yield from within(module[_called(instruction, role)], of_parts, fused, visit)

    yield from within(module[module.entry], 1.0, False, None)


def turns_of(counted: Mapping[str, float]) -> Callable[[str], float | None]:
    """The argument `turns` of `walk`: gives the iterations of a loop by its name, such as
    "…/body/diagonal/while".
    """

    def turns(name: str) -> float | None:
        loop = re.search(rf"\b({'|'.join(counted)})\b[^/]*/while[^/]*$", name)
        return counted[loop[1]] if loop and counted else None

    return turns


def count_turns(model: DecoderConfig, length: int) -> dict[str, float]:
    """The mean number of iterations of each attention loop for a block of queries, in an untrained
    model, by name.

    Attention runs on one example with normally distributed queries and keys, so about half of all
    gates are open. If only positions decide where the loops of an encoding end, these numbers are
    exact for any data. The result is empty if attention has no such loops, or if it is split along
    the sequence, because each device then has other loops.
    """
    block = model.block
    shape = block.attention_shape(model.max_length)
    encoding = model.encoding.build(shape, rngs=nnx.Rngs(0))
    first = automatic(length, length, model.layout.length)[0]
    name = first if block.attention == "auto" else block.attention
    # The program is compiled for another device.
    if name == "fused" and placement.current_device() == CPU:
        name = "blockwise"
    return _count_turns(encoding, length, block.attention_blocks) if name == "blockwise" else {}


def loop_turns(encoding: Encoding, length: int, sizes: BlockSizes) -> list[float]:
    """The mean number of iterations of each loop of a fused kernel for a block of queries; see
    `count_turns`.
    """
    strips = np.arange(1, -(-length // sizes.queries) + 1) * sizes.queries
    blocks = float(np.ceil(strips / sizes.near).mean())
    diagonal = max(1, sizes.queries // sizes.near)
    if jax.eval_shape(encoding.saturated, carry_of(encoding)) is None:
        return [diagonal, blocks - diagonal]
    near = _count_turns(encoding, length, sizes).get("diagonal", blocks)
    zone = max(0.0, near - diagonal)
    far = blocks - max(near, diagonal)
    wide = max(1, sizes.far // sizes.near)
    whole = max(0.0, far - (wide - 1) / 2) / wide  # what is left over has any length below `wide`
    return [diagonal, zone, whole, *([far - wide * whole] if wide > 1 else [])]


def carry_of(encoding: Encoding) -> Any:
    """The shapes of the encoding's carry for one token."""
    q_BLHK, k_BMGK = _queries_and_keys(encoding.shape, 1)

    def carry(q_BLHK: Array, k_BMGK: Array) -> Any:
        x_BMD, positions_1M = jnp.zeros((1, 1, encoding.shape.width)), jnp.zeros((1, 1), jnp.int32)
        features, _ = encoding.features(Tokens(x_BMD, q_BLHK, k_BMGK, k_BMGK, positions_1M), None)
        return encoding.initial_carry(
            jnp.swapaxes(q_BLHK, 1, 2), jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), features)
        )

    return jax.eval_shape(carry, q_BLHK, k_BMGK)


def _queries_and_keys(shape: AttentionShape, length: int) -> tuple[Array, Array]:
    q_key, k_key = jax.random.split(jax.random.key(0))
    q_BLHK = jax.random.normal(q_key, (1, length, shape.num_heads, shape.head_dim))
    return q_BLHK, jax.random.normal(k_key, (1, length, shape.kv_heads, shape.head_dim))


def _count_turns(encoding: Encoding, length: int, blocks: Sequence[int] | None) -> dict[str, float]:
    q_BLHK, k_BMGK = _queries_and_keys(encoding.shape, length)
    x_BMD = jnp.zeros((1, length, encoding.shape.width))
    options: Any = {"implementation": "blockwise", "x": x_BMD, "embedded": True, "blocks": blocks}
    starts, turns = collections.Counter[int](), collections.Counter[int]()
    while_loop, numbers = jax.lax.while_loop, itertools.count()

    def counted(condition: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
        number = next(numbers)

        def turn(state: Any) -> Any:
            jax.debug.callback(lambda: turns.update([number]))
            return body(state)

        jax.debug.callback(lambda: starts.update([number]))
        return while_loop(condition, turn, state)

    # Iterations are counted inside the loops, because only the encoding and attention decide where
    # a loop ends.
    def attention() -> Array:
        return attend(q_BLHK, k_BMGK, k_BMGK, encoding=encoding, **options)

    with mock.patch.object(jax.lax, "while_loop", counted):
        lowered = jax.jit(attention).lower()
    if next(numbers) != len(LOOPS):
        return {}
    jax.block_until_ready(lowered.compile()())
    jax.effects_barrier()
    return {loop: turns[number] / starts[number] for number, loop in enumerate(LOOPS)}


def trip_count(module: Module, loop: Visit) -> int | None:
    """The number of iterations of a loop that counts up from one constant to another; None for any
    other loop.

    On CPUs and GPUs, the program's text states the number that XLA has found. On TPUs it does not.
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


def _called(instruction: Instruction, role: str) -> str:
    return instruction.attribute(rf"\b{role}=%?([\w.\-]+)") or ""


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction that computes a value, before any copies and conversions of the value."""
    instruction = computation[name]
    while instruction.opcode in _SAME and instruction.operands:
        instruction = computation[instruction.operands[0]]
    return instruction


def _entry(computation: Computation, instruction: Instruction) -> int | None:
    """The index of the entry of the loop's state that `instruction` reads; None if it does not read
    such an entry.
    """
    if instruction.opcode != "get-tuple-element":
        return None
    if computation[instruction.operands[0]].opcode != "parameter":
        return None
    return int(instruction.attribute(r"index=(\d+)") or 0)


def _step(body: Computation, index: int) -> int | None:
    """The constant that each iteration adds to an entry of the state, such as 0; None if there is
    no such constant.
    """
    root = body[body.root]
    if root.opcode != "tuple":
        return None
    entry = _source(body, root.operands[index])
    if _entry(body, entry) == index:
        return 0
    terms = [_source(body, name) for name in entry.operands] if entry.opcode == "add" else []
    counters = [term for term in terms if _entry(body, term) == index]
    constants = [term for term in terms if term.opcode == "constant"]
    return _number(constants[0]) if len(counters) == len(constants) == 1 else None


def _initial(module: Module, loop: Visit, index: int) -> int | None:
    """The value of an entry of the state before the loop."""
    computation = loop.computation
    state = _source(computation, loop.instruction.operands[0])
    if state.opcode != "tuple":
        return None
    return _constant(module, computation, _source(computation, state.operands[index]), loop.around)


def _constant(
    module: Module, computation: Computation, value: Instruction, loop: Visit | None
) -> int | None:
    """The number that a value always has; None if it varies.

    The value may be a constant entry of a loop's state.
    """
    if value.opcode == "constant":
        return _number(value)
    index = _entry(computation, value)
    if index is None or loop is None:
        return None
    kept = _step(module[_called(loop.instruction, "body")], index) == 0
    return _initial(module, loop, index) if kept else None


def _number(constant: Instruction) -> int | None:
    text = re.fullmatch(r"\s*(-?\d+)\s*", constant.arguments)
    return int(text[1]) if text else None
