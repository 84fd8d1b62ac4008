"""Scores of a user's own, as functions and as classes, in every implementation with every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
from cope_jax.attention import attend, flex_attention, full_attention, prepare
from cope_jax.attention.kernels.cpu import library
from cope_jax.encodings import AttentionShape, Carry, Encoding
from cope_jax.errors import ConfigError
from cope_jax.ops.interpolate import interpolate, table_logits
from cope_jax.ops.sums import suffix_sum
from tests.attention.test_generated import native as native
from tests.attention.test_generated import quickly as quickly

ROWS = 6
BLOCKWISE, FUSED = (pytest.param(name, marks=pytest.mark.slow) for name in ("blockwise", "fused"))
IMPLEMENTATIONS = ["full", BLOCKWISE, "fused"]


def cope_start(q, params):
    return Carry(sums=jnp.zeros(q.shape[:3]), constants=table_logits(q, params["table"]))


def cope_score(pairs, carry, params):
    gates = jnp.where(pairs.mask, jax.nn.sigmoid(pairs.logits), 0.0)
    counts = carry.sums[..., None] + suffix_sum(gates)
    added = interpolate(carry.constants, jnp.minimum(counts, ROWS - 1.0), True)
    return pairs.logits + added, carry._replace(sums=counts[..., 0])


def cope_saturated(carry, params):
    return carry.sums >= ROWS - 1


def cope_tail(pairs, carry, params):
    return pairs.logits + carry.constants[..., -1:]


COPE = {
    "score": cope_score,
    "carry": cope_start,
    "saturated": cope_saturated,
    "tail": cope_tail,
}


def alibi_score(pairs, carry, params):
    distance = pairs.distance.astype(pairs.logits.dtype)
    return pairs.logits - params["slopes"][None, :, None, None] * distance, carry


def fox_score(pairs, carry):
    sums = pairs.q_features[..., :, None] - pairs.k_features[..., None, :]
    return pairs.logits + jnp.minimum(sums, 0), carry


def problem(length=100, batch=2):
    rng = np.random.default_rng(0)
    sizes = [(batch, length, heads, 8) for heads in (4, 2, 2)]
    return [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]


def gradients(function, *args):
    """The value and all gradients of a function of arrays."""
    value, pull = jax.vjp(function, *args)
    return jax.tree.map(np.asarray, (value, pull(jnp.cos(value))))


def assert_close(computed, exact):
    for x, y in zip(jax.tree.leaves(computed), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-5 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cope_as_functions_is_the_encoding(implementation, quickly):
    encoding = cj.encodings.create(
        "cope", num_heads=4, num_kv_heads=2, head_dim=8, npos_max=ROWS, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(encoding)
    table = jax.random.normal(jax.random.key(0), (ROWS, 8))

    def ours(table, q, k, v):
        return flex_attention(
            q, k, v, **COPE, params={"table": table}, implementation=implementation, window=60
        )

    def theirs(table, q, k, v):
        encoding = nnx.merge(graph, jax.tree.map(lambda _: table, params))
        return attend(q, k, v, encoding=encoding, implementation="full", window=60)

    arrays = table, *problem()
    assert_close(gradients(jax.jit(ours), *arrays), gradients(jax.jit(theirs), *arrays))
    assert_close(*(jax.jvp(f, arrays, arrays)[1] for f in (ours, theirs)))


@pytest.mark.parametrize("implementation", ["full", BLOCKWISE, FUSED])
def test_parameters_of_each_head(implementation, quickly):
    slopes = jnp.asarray([0.5, 0.25, 0.1, 0.0])
    q, k, v = problem()
    distance = jnp.arange(100.0)[:, None] - jnp.arange(100.0)[None]

    def ours(slopes, q, k, v):
        options = {"params": {"slopes": slopes}, "per_head": ["slopes"]}
        return flex_attention(q, k, v, score=alibi_score, implementation=implementation, **options)

    def exact(slopes, q, k, v):
        bias = -slopes[None, :, None, None] * distance[None, None]
        return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True)

    assert_close(gradients(ours, slopes, q, k, v), gradients(exact, slopes, q, k, v))


@pytest.mark.parametrize("implementation", ["full", BLOCKWISE, FUSED])
def test_features_of_tokens(implementation, quickly):
    """FoX: the sums of the logarithms of forget gates, of the last 70 of 100 tokens as queries."""
    q, k, v = problem()
    gates = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(1), (2, 100, 4)))

    def ours(gates, q, k, v):
        sums = jnp.cumsum(gates, axis=1)
        return flex_attention(
            q[:, 30:], k, v, score=fox_score, features=sums, implementation=implementation
        )

    def exact(gates, q, k, v):
        sums = jnp.cumsum(gates, axis=1).swapaxes(1, 2)
        bias = jnp.minimum(sums[..., :, None] - sums[..., None, :], 0)[:, :, 30:]
        allowed = jnp.arange(30, 100)[:, None] >= jnp.arange(100)[None]
        return jax.nn.dot_product_attention(q[:, 30:], k, v, bias, allowed[None, None])

    assert_close(gradients(ours, gates, q, k, v), gradients(exact, gates, q, k, v))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [(2, 99, 4), (2, 101, 4), (2, 100, 2), (2, 100, 3), (3, 100, 4)])
def test_features_of_another_size_are_refused(size, implementation):
    """A kernel would read memory of others."""
    options = {"features": jnp.ones(size), "implementation": implementation}
    with pytest.raises(ConfigError, match=r"^features of [Ff]lex_?[Aa]ttention must"):
        flex_attention(*problem(), score=fox_score, **options)


class Short(Encoding):
    """Features of one token fewer than there are."""

    def features(self, tokens, state):
        return tokens.k[:, 1:], ()


def test_features_of_a_class_have_the_size_of_its_tokens():
    encoding = Short(Short.Config(), AttentionShape(4, 8, 2), rngs=nnx.Rngs(0))
    message = r"features of Short must be arrays \[2, 100, heads, …\] with 4, 2 or 1 heads, got \[2, 99, 2"
    with pytest.raises(ConfigError, match=f"^{message}"):
        attend(*problem(), encoding=encoding)


def hiding_score(pairs, carry):
    """Hides all keys from the queries from 70 on, and those farther than 50 from the others."""
    hidden = (pairs.q_positions[:, None, :, None] >= 70) | (pairs.distance > 50)
    return jnp.where(hidden, -jnp.inf, pairs.logits), carry


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_score_may_hide_pairs(implementation, quickly):
    index = jnp.arange(100)
    distance = index[:, None] - index[None]
    seen = (distance >= 0) & (distance <= 50) & (index[:, None] < 70)

    def ours(q, k, v):
        return flex_attention(q, k, v, score=hiding_score, implementation=implementation)

    def exact(q, k, v):
        logits = jnp.einsum("blhk,bmhk->bhlm", q, jnp.repeat(k, 2, axis=2)) / 8**0.5
        weights = jnp.where(seen, jnp.exp(logits), 0)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9)
        return jnp.einsum("bhlm,bmhk->blhk", weights, jnp.repeat(v, 2, axis=2))

    assert_close(gradients(ours, *problem()), gradients(exact, *problem()))


def test_a_kernel_runs_it_where_auto_may_choose(quickly, monkeypatch, caplog):
    texts = []
    load = library.load_kernel
    monkeypatch.setattr(library, "load_kernel", lambda text: texts.append(text) or load(text))
    params = {"slopes": jnp.ones(4)}
    out = flex_attention(*problem(), score=alibi_score, params=params, per_head=["slopes"])
    assert out.shape == (2, 100, 4, 8) and texts


def plain(pairs, carry):
    return pairs.logits, carry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": None}, "score of flex_attention must be a function, got None"),
        ({"tail": 3}, "tail of flex_attention must be a function, got 3"),
        ({"widnow": 3}, "unknown option of flex_attention 'widnow': did you mean 'window'?"),
        ({"encoding": 3}, "unknown option of flex_attention 'encoding'"),
        ({"per_head": ["a"]}, "unknown name in per_head 'a'"),
        ({"per_head": "a"}, "per_head of flex_attention must be "),
        ({"params": jnp.ones(2)}, "params of flex_attention must be "),
        (
            {"params": {"a": [0.5]}, "per_head": ["a"]},
            r"params\['a'\] is in per_head, so its first",
        ),
        (
            {"params": {"a": jnp.ones((2, 3))}, "per_head": ["a"]},
            r"params\['a'\] is in per_head, so its first axis must have the 4 heads of q, \[B, L, H, K\], got",
        ),
        ({"score": lambda pairs, carry: pairs.logits}, "score of FlexAttention must return the"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_mistakes_are_one_line(change, message):
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        score = (lambda pairs, carry, params: plain(pairs, carry)) if "params" in change else plain
        flex_attention(*problem(20), **{"score": score, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("implementation", ["auto", "blockwise"])
@pytest.mark.parametrize("second", [False, True])
def test_it_takes_the_options_of_attend(second, implementation):
    q, k, v = problem()
    none = cj.encodings.create("none", num_heads=4, num_kv_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0), "causal": False, "window": 9}
    if second:
        ids, mask = jnp.arange(100)[None] // 30, jnp.arange(100)[None, None, None] != 7
        options = {"q_segment_ids": ids, "k_segment_ids": ids, "mask": mask}
        options |= {
            "scale": 0.3,
            "logits_soft_cap": 2.0,
            "bias": jnp.cos(jnp.ones((1, 4, 100, 100))),
        }
    computed = flex_attention(q, k, v, score=plain, implementation=implementation, **options)
    exact = functools.partial(attend, encoding=none, implementation="full")(q, k, v, **options)
    np.testing.assert_allclose(computed, exact, rtol=0, atol=2e-6)
    assert np.abs(exact - attend(q, k, v, encoding=none, implementation="full")).max() > 0.1


class Temperature(Encoding):
    """Logits divided by the number of heads."""

    def score(self, pairs, carry):
        return pairs.logits / self.shape.num_heads, carry


class Slopes(Encoding):
    """ALiBi as a loop over the heads of the shape."""

    def score(self, pairs, carry):
        slopes = jnp.asarray([0.5**head for head in range(self.shape.num_heads)])
        distance = pairs.distance.astype(pairs.logits.dtype)
        return pairs.logits - slopes[None, :, None, None] * distance, carry


@pytest.mark.parametrize(("kind", "implementation"), [(Temperature, "fused"), (Slopes, "auto")])
def test_a_score_knows_the_number_of_heads(kind, implementation, quickly):
    """A kernel computes one head, which must not become the only one."""
    encoding = kind(kind.Config(), AttentionShape(4, 8, 2), rngs=nnx.Rngs(0))
    computed = attend(*problem(), encoding=encoding, implementation=implementation)
    exact = full_attention(encoding, prepare(*problem(), encoding=encoding))
    np.testing.assert_allclose(computed, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["full", "blockwise"])
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda q: jnp.zeros(3), "the carry of FlexAttention must be a Carry, got "),
        (
            lambda q: Carry(sums=jnp.zeros(q.shape[:3], jnp.int32)),
            r"the sums .* must be floating-point numbers \[2, 4, 20\], got int32 \[2, 4, 20\]: put",
        ),
        (
            lambda q: Carry(sums=jnp.zeros((2, 1, 20))),
            r"the sums .*, got float32 \[2, 1, 20\]: put",
        ),
    ],
    ids=["array", "int", "shape"],
)
def test_a_carry_of_another_form_is_one_line(start, message, implementation):
    with pytest.raises(ConfigError, match=f"^{message}"):
        flex_attention(*problem(20), score=plain, carry=start, implementation=implementation)


def test_an_array_from_around_a_score_is_no_parameter():
    def loss(w):
        return flex_attention(
            *problem(20),
            score=lambda pairs, carry: (w * pairs.logits, carry),
            implementation="blockwise",
        ).sum()

    with pytest.raises(ConfigError, match="one of the params of flex_attention"):
        jax.grad(loss)(1.5)


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
def test_a_row_of_which_a_bias_hides_all_keys_is_zero(lowest):
    bias = np.zeros((1, 1, 100, 100), np.float32)
    bias[0, 0, 99] = bias[0, 0, 3] = bias[0, 0, 50, :20] = lowest

    def results(implementation):
        def attention(bias, q, k, v):
            return flex_attention(q, k, v, score=plain, bias=bias, implementation=implementation)

        return gradients(attention, jnp.asarray(bias), *problem())

    full, blockwise = results("full"), results("blockwise")
    assert not full[0][:, [3, 99]].any()
    assert_close(blockwise, full)


@pytest.mark.usefixtures("native")
def test_a_parameter_of_each_head_that_is_not_named_has_no_kernel(caplog):
    arguments = {"score": alibi_score, "params": {"slopes": jnp.ones(4)}}
    message = 'so say which axis of parameters is "heads"'
    with pytest.raises(ConfigError, match=message):
        flex_attention(*problem(), **arguments, implementation="fused")
    assert [x.levelname for x in caplog.records if message in x.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"score": lambda s, b, h, i, j: s},
            "score of flex_attention must take the arguments (pairs, carry)",
        ),
        (
            {"score": lambda pairs, carry, params: (pairs.logits, carry)},
            "must take the arguments (pairs, carry); one more gets what is given as params={...}",
        ),
        (
            {"score": lambda pairs, carry: (pairs.logits + carry.sums[..., None], carry)},
            "failed (tuple indices must be integers or slices, not tuple): it gets an empty carry",
        ),
        (
            {"score": lambda pairs, carry: (pairs.logits, carry), "params": {}},
            "score of flex_attention must take the arguments (pairs, carry, params)",
        ),
        (
            {"score": lambda pairs, carry: (pairs.logits, carry), "carry": lambda: None},
            "carry of flex_attention must take the arguments (q)",
        ),
    ],
)
def test_functions_of_other_arguments_are_one_line(functions, message):
    q = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ConfigError) as error:
        flex_attention(q, q, q, **functions)
    assert message in str(error.value)
