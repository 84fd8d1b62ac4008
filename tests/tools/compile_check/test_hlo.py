import jax
import jax.numpy as jnp
import pytest

from tools.compile_check.hlo import Module, Shape

TEXT = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

ENTRY %main (x: bf16[2,3]) -> (bf16[2,3], f32[]) {
  %x = bf16[2,3]{1,0:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="x"}
  %c = f32[]{:T(128)} constant(2.5)
  %start = (bf16[2,3]{1,0:T(8,128)}, f32[], /*index=2*/u32[]{:S(2)}) all-reduce-start(%x, /*index=1*/%c), to_apply=%add
  %fusion.1 = bf16[2,3]{1,0:T(8,128)(2,1)} fusion(%x), kind=kLoop, calls=%add, backend_config={"a":{"b":[]}}
  ROOT %tuple.1 = (bf16[2,3]{1,0:T(8,128)(2,1)}, f32[]{:T(128)}) tuple(%fusion.1, %c)
}
"""


@pytest.fixture(scope="module")
def module():
    return Module.parse(TEXT)


def test_a_program_is_its_computations_and_the_one_that_runs(module):
    assert (sorted(module.computations), module.entry) == (["add", "main"], "main")
    assert [i.opcode for i in module["main"].instructions.values()] == [
        "parameter",
        "constant",
        "all-reduce-start",
        "fusion",
        "tuple",
    ]
    assert (module["main"].root, module["add"].root) == ("tuple.1", "sum")


def test_tuples_layouts_and_comments_are_read_past(module):
    start = module["main"]["start"]
    assert start.shapes == (Shape("bf16", (2, 3)), Shape("f32", ()), Shape("u32", ()))
    assert start.operands == ["x", "c"]
    assert module["main"].inputs(start) == [Shape("bf16", (2, 3)), Shape("f32", ())]


def test_a_fusion_runs_what_it_calls_and_a_reduction_only_says_how_to_add(module):
    main = module["main"]
    assert main["fusion.1"].calls() == ["add"]
    assert main["start"].calls() == []


@pytest.mark.parametrize(
    ("kind", "count"), [("bf16", 2), ("f32", 4), ("pred", 1), ("s8", 1), ("f8e4m3fn", 1)]
)
def test_bytes_are_those_of_the_type(kind, count):
    assert Shape(kind, (3, 5)).bytes == 15 * count


def test_a_type_of_unknown_size_is_not_guessed():
    with pytest.raises(ValueError, match="unknown number of bits of type 'odd'"):
        _ = Shape("odd", (3,)).bytes


def test_the_text_before_and_after_optimisation_is_read():
    lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    for text in (lowered.as_text("hlo"), lowered.compile().as_text()):
        module = Module.parse(text)
        opcodes = {
            i.opcode
            for computation in module.computations.values()
            for i in computation.instructions.values()
        }
        assert {"parameter", "dot"} <= opcodes
        assert module[module.entry].root
