import jax
import jax.numpy as jnp
import pytest

from tests.tools.compile_check.hlo_programs import compiled, floats, lowered
from tools.compile_check.hlo import Module
from tools.compile_check.trip_counts import walk

# As TPUs write a loop: constants are a part of its state, which also holds those of the loop
# within.
WIDE = """HloModule wide

%inner_body (p: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {
  %p = (s32[], s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] get-tuple-element(%p), index=1
  %x = f32[4] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %y = f32[4] sine(%x)
  ROOT %t = (s32[], s32[], f32[4]) tuple(%next, %end, %y)
}

%inner_condition (p: (s32[], s32[], f32[4])) -> pred[] {
  %p = (s32[], s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] get-tuple-element(%p), index=1
  ROOT %test = pred[] compare(%i, %end), direction=LT
}

%body (p: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {
  %p = (s32[], s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] get-tuple-element(%p), index=1
  %kept = s32[] copy(%end)
  %x = f32[4] get-tuple-element(%p), index=2
  %first = s32[] constant(1)
  %state = (s32[], s32[], f32[4]) tuple(%first, %kept, %x)
  %inner = (s32[], s32[], f32[4]) while(%state), condition=%inner_condition, body=%inner_body
  %y = f32[4] get-tuple-element(%inner), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%one, %i)
  ROOT %t = (s32[], s32[], f32[4]) tuple(%next, %kept, %y)
}

%condition (p: (s32[], s32[], f32[4])) -> pred[] {
  %p = (s32[], s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %last = s32[] constant(7)
  ROOT %test = pred[] compare(%last, %i), direction=GT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %zero = s32[] constant(4)
  %limit = s32[] constant(10)
  %state = (s32[], s32[], f32[4]) tuple(%zero, %limit, %x)
  %loop = (s32[], s32[], f32[4]) while(%state), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}
  ROOT %y = f32[4] get-tuple-element(%loop), index=2
}
"""


def unknown(module, turns=lambda name: None):
    return sum(visit.unknown for visit in walk(module, turns))


def sines(visited):
    return sum(v.times for v in visited if v.instruction.opcode == "sine")


def nested(x):
    def outer(x, _):
        return jax.lax.fori_loop(2, 6, lambda i, x: jnp.sin(x), x), None

    return jax.lax.scan(outer, x, length=3)[0]


@pytest.mark.parametrize("form", [compiled, lowered])
def test_what_stands_in_loops_runs_as_often_as_they_turn_together(form):
    assert sines(form(nested, floats(1000))) == 3 * 4


def test_a_loop_counts_up_to_a_limit_that_its_state_holds_also_through_the_loop_around():
    # Outwards 4 ≤ i < 7; inwards 1, 3, 5, 7, 9 while i < 10.
    assert sines(walk(Module.parse(WIDE), lambda name: None)) == 3 * 5


@pytest.mark.parametrize(
    ("change", "to"),
    [
        ("%two = s32[] constant(2)", "%two = s32[] custom-call(%x)"),
        ("%kept = s32[] copy(%end)", "%kept = s32[] add(%end, %end)"),
        ("%limit = s32[] constant(10)", "%limit = s32[] custom-call(%x)"),
        ("tuple(%next, %end, %y)", "tuple(%next, %next, %y)"),
    ],
)
def test_a_limit_that_changes_or_is_computed_is_not_guessed(change, to):
    assert change in WIDE
    module = Module.parse(WIDE.replace(change, to))
    assert unknown(module) == 1
    assert sines(walk(module, lambda name: None)) == 3 * 1


def test_loops_that_the_data_end_turn_as_often_as_one_is_told():
    def halve(x):
        return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: jnp.sin(x), x)

    text = jax.jit(halve).lower(floats(8)).compile().as_text()
    module, asked = Module.parse(text), []

    def turns(name):
        asked.append(name)
        return 2.5

    assert sines(walk(module, turns)) == 2.5
    assert asked == ["jit(halve)/while"]
    assert (unknown(module, turns), unknown(module)) == (0, 1)


def test_what_is_in_a_fusion_is_marked_as_such():
    visited = compiled(lambda x: jnp.sin(x) + 1, floats(1000))
    assert {v.fused for v in visited if v.instruction.opcode == "sine"} == {True}
    assert {v.fused for v in visited if v.instruction.opcode == "fusion"} == {False}
