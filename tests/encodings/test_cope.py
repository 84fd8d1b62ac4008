"""CoPE's own promises: the listing's semantics, its gradients, float32 positions, and the values
worked by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend, prepare
from cope_jax.errors import ConfigError
from tests.encodings.cases import rule_of
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.attention import cope_backward
from tests.oracle.differences import gradients as finite_differences
from tests.oracle.encodings import Sizes, cope_positions, sigmoid

SIZES_ONE = Sizes(heads=1, kv_heads=1, head_dim=4, model_dim=4, max_length=12)


def create(spec="cope", heads=1, width=4, table=None, **options):
    encoding = encodings.create(spec, num_heads=heads, head_dim=width, rngs=nnx.Rngs(0), **options)
    if table is not None:
        encoding.table[...] = jnp.asarray(table)
    return encoding


def one_head(seed, length, npos_max, width=4, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = [(length, width), (length, width), (length, width), (npos_max, width), (length, width)]
    return [rng.normal(scale=scale, size=shape) for shape in shapes]


@pytest.mark.parametrize("npos_max", [2, 3, 9])
@pytest.mark.parametrize(
    "mask", [{}, {"window": 3}, {"q_segments": [0, 0, 1, 1, 1], "k_segments": [0, 0, 1, 1, 1]}]
)
def test_written_gradients_equal_finite_differences(npos_max, mask):
    """The oracle against itself: the backward formulae are those of the forward."""
    q, k, v, e, dout = one_head(0, 5, npos_max)

    def loss(arrays):
        rule = rule_of(f"cope(npos_max={npos_max})", {"table": arrays["e"]}, SIZES_ONE)
        out = oracle_attention(
            arrays["q"][:, None], arrays["k"][:, None], arrays["v"][:, None], rule, **mask
        )
        return float((out[:, 0] * dout).sum())

    numeric = finite_differences(loss, {"q": q, "k": k, "v": v, "e": e})
    for written, name in zip(cope_backward(q, k, v, e, dout, **mask), "qkve", strict=True):
        np.testing.assert_allclose(written, numeric[name], rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("npos_max", [4, 70])
def test_gradients_equal_the_backward_formulae(npos_max, x64):
    """Long enough for several blocks of the suffix sum."""
    q, k, v, e, dout = one_head(1, 70, npos_max)

    def out(q, k, v, e):
        encoding = create(npos_max=npos_max)
        encoding.table[...] = e
        return attend(
            *(a[None, :, None] for a in (q, k, v)), encoding=encoding, implementation="full"
        )[0, :, 0]

    _, pull = jax.vjp(jax.jit(out), q, k, v, e)
    for actual, exact, name in zip(
        pull(dout), cope_backward(q, k, v, e, dout), "qkve", strict=True
    ):
        np.testing.assert_allclose(
            actual, exact, rtol=0, atol=1e-11 * np.abs(exact).max(), err_msg=name
        )


def test_worked_by_hand(x64):
    """Zero keys make every gate 1/2, so p_ij = (i−j+1)/2; a table e[n] = n²·u and q = c·u give c·n²
    at integers.
    """
    length, width, npos_max, c = 7, 4, 3, 0.3
    u = np.array([1.0, 0.0, 0.0, 0.0])
    table = np.arange(npos_max)[:, None] ** 2 * u
    q = jnp.asarray(np.broadcast_to(c * u, (1, length, 1, width)))
    v = np.random.default_rng(0).normal(size=(1, length, 1, width))
    out = attend(
        q,
        jnp.zeros_like(q),
        v,
        encoding=create(npos_max=npos_max, table=table),
        implementation="full",
    )
    # p = 1/2, 1, 3/2, 2, then clipped to 2:  e = 1/2, 1, 5/2, 4, 4, 4 ...
    logits = c * np.array([0.5, 1.0, 2.5, 4.0, 4.0, 4.0, 4.0])
    for i in range(length):
        weights = np.exp(logits[: i + 1][::-1])
        np.testing.assert_allclose(
            out[0, i, 0], weights / weights.sum() @ v[0, : i + 1, 0], rtol=0, atol=1e-12
        )


def test_the_position_logit_is_not_scaled_unless_asked(x64):
    """Listing 1 adds q·e[p] as it is; the released code divides it by √K."""
    encoding, scaled = (
        create(npos_max=3, table=np.eye(3, 4), scale_position_logits=s) for s in (False, True)
    )
    q, k, _, _, _ = one_head(2, 5, 3)
    added, added_scaled = (added_logits(cope, q, k) for cope in (encoding, scaled))
    assert np.abs(added).max() > 0.1
    np.testing.assert_allclose(added_scaled, added / 2, rtol=0, atol=1e-14)


def test_maps_are_float32_gates_and_positions():
    """Also for bfloat16 queries and keys; a masked pair has a gate of exactly 0."""
    length, npos_max = 12, 4
    q, k, v, e, _ = (jnp.asarray(a, jnp.bfloat16) for a in one_head(3, length, npos_max))
    encoding = create(npos_max=npos_max, table=e.astype(jnp.float32))
    segments = jnp.asarray([[0] * 5 + [1] * 7])
    q, k, v = (a[None, :, None] for a in (q, k, v))
    pairs = prepare(
        q, k, v, encoding=encoding, q_segment_ids=segments, k_segment_ids=segments
    ).pairs()
    logits, mask = pairs.logits, pairs.mask
    assert logits.dtype == jnp.float32
    assert [leaf.dtype for leaf in jax.tree.leaves(encoding.initial_carry(pairs.q, ()))] == [
        jnp.float32
    ] * 2
    maps = encoding.maps(pairs)
    assert {name: array.dtype for name, array in maps.items()} == {
        "gates": jnp.float32,
        "positions": jnp.float32,
    }
    gates, positions = (np.asarray(maps[name])[0, 0] for name in ("gates", "positions"))
    allowed = np.asarray(mask)[0, 0]
    assert np.all(gates[~allowed] == 0)
    for i in range(length):
        seen = np.flatnonzero(allowed[i])
        exact = [sigmoid(float(logits[0, 0, i, j])) for j in seen]
        np.testing.assert_allclose(gates[i, seen], exact, rtol=0, atol=1e-6)
        np.testing.assert_allclose(
            positions[i, seen], np.minimum(cope_positions(exact), npos_max - 1), rtol=0, atol=4e-6
        )
    assert positions.max() == npos_max - 1, (
        "nothing was clipped: the test says nothing about the clip"
    )


@pytest.mark.parametrize("gate", ["query_key", "value"])
def test_bfloat16_gradients_survive_a_long_row(gate):
    """Counting in bfloat16 would lose the fraction that carries the gradient of the gates; see
    `accumulator_dtype`.
    """
    short = [jnp.asarray(a, jnp.bfloat16)[None, :, None] for a in one_head(4, 256, 64, width=16)]
    q, k, v, e, dout = short
    table = e[0, :, 0].astype(jnp.float32)

    @jax.jit
    def dq(q, k, v, dout):
        def out(q):
            return attend(
                q,
                k,
                v,
                encoding=create(width=16, npos_max=64, gate=gate, table=table),
                implementation="full",
            )

        return jax.vjp(out, q)[1](dout)[0]

    exact = np.asarray(dq(*(a.astype(jnp.float32) for a in (q, k, v, dout))))
    rough = np.asarray(dq(q, k, v, dout).astype(jnp.float32))
    # What is left, 0.003, is the rounding of weights, output and gradient to 8 bits. Rounding z as
    # well would make it 0.007, and positions or gates in bfloat16 tens of percent.
    assert np.sqrt(np.mean((rough - exact) ** 2) / np.mean(exact**2)) < 0.005


@pytest.mark.parametrize("spec", ["cope(gate=separate_key)", "selective_rope(rank=0)"])
def test_the_layer_input_is_needed_in_the_width_of_the_model(spec):
    encoding = create(spec)
    q = jnp.ones((1, 3, 1, 4))
    with pytest.raises(ConfigError, match="needs the input of the layer: pass x"):
        attend(q, q, q, encoding=encoding)
    with pytest.raises(ConfigError, match="built for model_dim=4, but x has width 8"):
        attend(q, q, q, encoding=encoding, x=jnp.ones((1, 3, 8)))
    assert attend(q, q, q, encoding=encoding, x=jnp.ones((1, 3, 4))).shape == q.shape


def test_gates_of_a_composition_do_not_see_the_other_part(x64):
    """CoPE's gates are σ(q·k/√K) beside relative positions too: what the parts add is summed, in
    either order.
    """
    rng = np.random.default_rng(5)
    q, k, _, e, _ = one_head(5, 6, 4)
    table = rng.normal(size=(6, 4))
    parts = {
        "cope": create("cope", npos_max=4, table=e),
        "relative": create("relative", max_distance=6, table=table),
    }
    alone = {name: added_logits(encoding, q, k) for name, encoding in parts.items()}
    for spec in ("cope+relative", "relative+cope"):
        both = create(spec, cope={"npos_max": 4}, relative={"max_distance": 6})
        assert list(both.parts) == spec.split("+")
        for name, encoding in both.parts.items():
            encoding.table[...] = parts[name].table[...]
        np.testing.assert_allclose(
            added_logits(both, q, k), alone["cope"] + alone["relative"], rtol=0, atol=1e-14
        )


def test_nan_inputs_stay_nan():
    """A diverged model shows NaN, in value and gradient, rather than a position out of the table."""
    q, k, v, e, _ = (np.asarray(a, np.float32) for a in one_head(6, 5, 3))
    q[2] = np.nan
    encoding = create(npos_max=3, table=e)
    q, k, v = (jnp.asarray(a)[None, :, None] for a in (q, k, v))

    @jax.jit
    def run(q):
        out, pull = jax.vjp(lambda q: attend(q, k, v, encoding=encoding, implementation="full"), q)
        return out, *pull(jnp.ones_like(out))

    for array in run(q):
        assert np.isnan(array[0, 2]).all() and np.isfinite(np.delete(array, 2, axis=1)).all()


def added_logits(encoding, q_LK, k_MK):
    """score − content logits of one head at all causal pairs; 0 elsewhere."""
    q, k = (jnp.asarray(a)[None, :, None] for a in (q_LK, k_MK))
    pairs = prepare(q, k, k, encoding=encoding).pairs()
    score, _ = encoding.score(pairs, encoding.initial_carry(pairs.q, pairs.q_features))
    return np.where(np.asarray(pairs.mask)[0, 0], np.asarray(score - pairs.logits)[0, 0], 0)


@pytest.mark.parametrize("implementation", ["full", "blockwise"])
def test_gates_of_values_of_another_width_are_one_line(implementation):
    q, v = jnp.ones((1, 5, 1, 4)), jnp.ones((1, 5, 1, 6))
    encoding = encodings.create("cope(gate=value)", num_heads=1, head_dim=4, rngs=nnx.Rngs(0))
    with pytest.raises(
        ConfigError,
        match="values need the width of the queries, 4, but have 6: choose another gate",
    ):
        attend(q, q, v, encoding=encoding, implementation=implementation)


@pytest.mark.parametrize(("gate", "low", "high"), [("query_key", 0.01, 0.2), ("value", 0.0, 0.01)])
def test_rotation_in_bfloat16_moves_positions_past_the_jumps_of_the_gradient(gate, low, high):
    """The output stays near, and so does the gradient if gates read nothing rotated: see
    docs/attention.md.
    """
    rng = np.random.default_rng(0)
    short = [jnp.asarray(rng.normal(size=(1, 128, 1, 64)), jnp.bfloat16) for _ in range(4)]
    encoding = create("cope+rope", width=64, cope={"npos_max": 64, "gate": gate})
    encoding.parts["cope"].table[...] = jnp.asarray(rng.normal(size=(64, 64)) / 10, jnp.float32)

    @jax.jit
    def out_and_dq(q, k, v, dout):
        out, pull = jax.vjp(lambda q: attend(q, k, v, encoding=encoding, implementation="full"), q)
        return out, *pull(dout)

    rough, exact = out_and_dq(*short), out_and_dq(*(x.astype(jnp.float32) for x in short))
    out, dq = (
        np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
        for a, b in zip(rough, exact, strict=True)
    )
    assert out < 0.01 and low < dq < high
