"""In the hooks that a kernel traces, data are touched by ops and arithmetic only."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from cope_jax.encodings import Carry, Encoding, cope
from tests.encodings.cases import build, every, parts, parts_of
from tests.encodings.jaxprs import mask_ops, primitives
from tests.encodings.test_laws import Block, block_of

# Arithmetic of each entry, sums and products, and shapes known while tracing: what every kernel
# compiler lowers.
ALLOWED = {
    "abs", "add", "and", "div", "eq", "exp", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "rsqrt", "select_n",
    "sign", "sqrt", "square", "sub", "tanh", "broadcast_in_dim", "concatenate", "convert_element_type", "dot_general",
    "iota", "reduce_max", "reduce_min", "reduce_sum", "reshape", "slice", "squeeze", "stop_gradient", "transpose",
    "unstack", "custom_jvp_call", "jit",
}  # fmt: skip


def shapes_of(spec):
    """`block_of`, of which only shapes are computed."""
    pairs, carry = jax.eval_shape(lambda: block_of(spec)[1:])
    return Block(nnx.merge(*build(spec)), pairs, carry)


def traced(block):
    graphdef, params = nnx.split(block.encoding)

    def hooks(params, pairs, carry):
        encoding = nnx.merge(graphdef, params)
        return (
            encoding.initial_carry(pairs.q, pairs.q_features),
            encoding.score(pairs, carry),
            encoding.saturated(carry),
            encoding.done(carry),
            encoding.sink(carry),
            encoding.tail(pairs, carry) if encoding.saturated(carry) is not None else None,
        )

    return primitives(hooks, params, block.pairs, block.carry)


@every()
def test_hooks_touch_data_by_ops_only(spec, monkeypatch, x64):
    # They visit the keys in blocks of their own, so no kernel takes them.
    if {"path", "wall"} & set(dict(parts(spec))):
        assert "scan" in traced(shapes_of(spec))
        return
    mask_ops(monkeypatch)
    operations = traced(shapes_of(spec))
    assert operations <= ALLOWED, operations - ALLOWED
    encoding = nnx.merge(*build(spec))
    assert operations or all(
        type(encoding_of_part).score is Encoding.score for encoding_of_part in parts_of(encoding)
    )


BAD = [
    lambda x: jnp.flip(x, -1),
    lambda x: jnp.cumsum(x, -1),
    lambda x: x[..., x[0, 0, 0].astype(int)],
]


@pytest.mark.parametrize("bad", BAD, ids=["flip", "cumsum", "index"])
def test_what_is_forbidden_is_found(bad, monkeypatch, x64):
    class Bad(Encoding):
        def score(self, pairs, carry):
            return bad(pairs.logits), carry

    block = block_of("none")
    mask_ops(monkeypatch)
    encoding = Bad(Bad.Config(), block.encoding.shape, rngs=nnx.Rngs(0))
    assert traced(block._replace(encoding=encoding, carry=Carry())) - ALLOWED
    assert jax.make_jaxpr(cope.suffix_sum)(jnp.ones(3)).eqns[0].params["name"] == "ops_call"
