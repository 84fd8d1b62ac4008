"""Each law is broken by a function that it must catch, and a user's mistake is one clear line."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
from cope_jax.attention import attend_cached, create_cache
from cope_jax.errors import ConfigError
from cope_jax.testing import LAWS, check, from_torch, qkv, tokens, vectors
from cope_jax.testing.leaks import places
from tests.testing.test_public_bugs import BUGS

ids, padding = {"segments": "ids"}, {"padding": "padding"}


def so_far(x, **_):
    """The mean of the tokens so far."""
    return x.cumsum(1) / np.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


@jax.jit
@jax.custom_vjp
def leaks_backward(x):
    return 2 * x


leaks_backward.__wrapped__.defvjp(
    lambda x: (2 * x, None), lambda _, dout: (2 * dout + dout.sum(1, keepdims=True),)
)


def backward_of_the_past(x, mask=None, padding=False):
    """The sum of all tokens so far that a mask or padding leaves; its gradient forgets these."""
    past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), x.dtype))
    seen = past if mask is None else jnp.where(mask[:, None] if padding else mask[:, 0], past, 0)
    total = jnp.einsum("...ij,...jk->...ik", seen, x)
    forgets = jnp.einsum("ij,...jk->...ik", past, x)
    return forgets + jax.lax.stop_gradient(total - forgets)


@jax.jit
def steep(x):
    """Its slopes are not its gradients."""
    return 2 * x - jax.lax.stop_gradient(x)


@jax.jit
def steep_under_a_mask(x, mask=None):
    past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), x.dtype))
    if mask is None:
        return past @ x
    seen = jnp.where(mask[:, 0], past, 0)
    return 1.1 * seen @ x - jax.lax.stop_gradient(0.1 * seen @ x)


BROKEN = {
    "causality": (
        lambda x: x + x.mean(1, keepdims=True),
        {},
        "token 15 changes output 0 by",
    ),
    "causality, in 16 bits": (
        lambda x: jnp.asarray(x + x.mean(1, keepdims=True), jnp.bfloat16),
        {},
        "changes output 0 by",
    ),
    "examples": (lambda x: x - x.mean(0), {}, "example 0 changes example 1"),
    "examples, of the middle": (
        lambda x: x + np.stack([0 * x[0], 0 * x[0], x[1], 0 * x[0]]),
        {},
        "example 1 changes example 2",
    ),
    "packed documents": (
        lambda x, ids=None: x + np.float32(np.arange(x.shape[1])[:, None] / 9),
        ids,
        "output 6, number 0 of document 3, is not that of the document at the start of a row",
    ),
    "right padding": (
        lambda x, padding=None: x + x.mean(1, keepdims=True),
        padding | {"causal": False},
        "token 15 (padding) changes output 0 by",
    ),
    "right padding, by its length": (
        lambda x, padding=None: (x if padding is None else x * padding[..., None]) / x.shape[1],
        padding | {"causal": False},
        "output 0 of example 0 differs by",
    ),
    "left padding": (
        lambda x, padding=None: x.cumsum(1),
        padding,
        "(padding) changes output 8 by",
    ),
    "decoding": (so_far, {"step": lambda cache, x: (x, None)}, "output 1 of example 0"),
    "mask": (lambda x, mask=None: so_far(x), {"mask": "mask"}, "changes output 1 by"),
    "shift": (
        lambda x, places=0: x + np.float32(places)[..., None],
        {"positions": "places", "shift": 7},
        "output 0 of example 0 differs by 7 from that at positions without 7 more",
    ),
    "length": (
        lambda x: x * x.shape[1],
        {},
        "from the same with 16 tokens instead of",
    ),
    "gradients": (steep, {}, "the gradient of x at token"),
    "gradient leaks": (leaks_backward, {}, "has the gradient"),
    "gradient leaks, of large outputs": (
        jax.jit(lambda x: 1e3 + x + leaks_backward(1e-3 * x)),
        {},
        "has the gradient",
    ),
    "gradient leaks, of what a mask hides": (
        jax.jit(lambda x, mask=None: backward_of_the_past(x, mask)),
        {"mask": "mask"},
        "output 8 has the gradient 2.7 at token 1 of x",
    ),
    "gradient leaks, of padding": (
        jax.jit(lambda x, real=None: backward_of_the_past(x, real, True)),
        {"padding": "real"},
        "output 8 has the gradient",
    ),
    "gradients under a mask": (
        steep_under_a_mask,
        {"mask": "mask"},
        "the gradient of x at token",
    ),
    "gradients of documents": (
        lambda x, ids=None: leaks_backward(x),
        ids,
        "the gradient of x at token",
    ),
    "blocks": (
        lambda x, size=4: x * size,
        {"blocks": [{"size": 4}, {"size": 2}]},
        "the outputs with {'size': 2} differ at token",
    ),
    "devices": (so_far, {"devices": lambda x: x}, "the outputs differ at token"),
    "reference": (
        steep,
        {"reference": jax.jit(lambda x: x * 1.0)},
        "the gradient of x differ",
    ),
}


def test_attention_over_the_heads_is_one_line():
    def attention(q, k, v):  # takes [B, heads, L, width], as PyTorch's does
        weights = jax.nn.softmax(jnp.einsum("bhlk,bhmk->bhlm", q, k), axis=-1)
        return jnp.einsum("bhlm,bhmk->bhlk", weights, v)

    for wrong in (attention, lambda q, k, v: v):
        with pytest.raises(ConfigError, match=r"no output depends on another token.*: arrays are"):
            check(wrong)


@pytest.mark.parametrize("length", [3, 64, 65, 80, 128, 300, 5000])
def test_as_many_places_are_tried_in_every_longer_row(length):
    chosen = places(length)
    assert len(chosen) == min(length, 64)
    assert {0, length - 1} <= {*chosen} <= {*range(length)} and [*chosen] == sorted(chosen)


@pytest.mark.parametrize("border", [16, 32, 64, 128, 192])
def test_a_leak_over_the_border_of_blocks_is_seen_in_a_longer_row(border):
    def leaks(x):
        past = np.tril(np.ones((256, 256), np.float32))
        past[border - 1, border] = 1.0
        return past[: x.shape[1], : x.shape[1]] @ x

    verdict = check(jax.jit(leaks), vectors(2), length=256)["causality"]
    assert verdict.tokens == (border, border - 1)


@pytest.mark.parametrize("law", BROKEN)
def test_a_law_sees_a_function_that_breaks_it(law):
    function, choices, words = BROKEN[law]
    verdict = check(function, vectors(3), **choices)[law.partition(",")[0]]
    assert verdict.verdict == "BROKEN" and words in verdict.counterexample, verdict


def test_every_law_is_tested_and_none_is_broken_by_what_keeps_it():
    broken = {law.partition(",")[0] for law in BROKEN} | {caught.law for caught in BUGS}
    assert set(LAWS) == broken
    report = check(so_far, vectors(3), step=running_mean)
    report.raise_if_broken()
    unchecked = {verdict.law for verdict in report if verdict.verdict == "not checked"}
    assert set(LAWS) - unchecked == {"causality", "examples", "decoding", "length"}
    assert "not checked" in str(report) and 'pass segments="KEYWORD"' in str(report)


def running_mean(cache, x):
    total, count = cache or (0, 0)
    sums = total + x.cumsum(1)
    counts = np.arange(count + 1, count + x.shape[1] + 1, dtype=x.dtype)
    return sums / counts[:, None], (sums[:, -1:], count + x.shape[1])


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attend_keeps_every_law(streaming):
    """With documents, padding, a cache and 16 bits; and in blocks, on one device and on four."""
    encoding = cj.encodings.create(
        "cope+rope", num_heads=4, num_kv_heads=2, head_dim=8, cope={"npos_max": 6}, rngs=nnx.Rngs(0)
    )
    encoding.cope.table[...] = jax.random.normal(jax.random.key(0), encoding.cope.table.shape)

    def attention(q, k, v, **options):
        return cj.attend(q, k, v, encoding=encoding, **options)

    def step(cache, q, k, v, q_segment_ids=None, q_positions=None, **_):
        cache = create_cache(encoding, batch=4, capacity=16) if cache is None else cache
        if q_positions is None:
            q_positions = cache.filled + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        real = None if q_segment_ids is None else q_segment_ids[:, -q.shape[1] :]
        cache = cache.enter(q_positions, real).append(q, k, v, encoding=encoding)
        return attend_cached(q, cache, encoding=encoding), cache

    choices = {}
    if streaming:
        ring = jax.jit(functools.partial(attention, sequence_axis="sequence"))
        blocks = [{"implementation": "blockwise", "blocks": (5, 3, 4)}]
        choices = {"blocks": blocks, "devices": ring}
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh) if streaming else contextlib.nullcontext():
        report = check(
            jax.jit(attention, static_argnames=("implementation", "blocks")),
            qkv(4, 2, 8),
            segments=lambda ids: {"q_segment_ids": ids, "k_segment_ids": ids},
            positions=lambda positions: {"q_positions": positions, "k_positions": positions},
            padding=lambda real: {"q_segment_ids": np.int32(real), "k_segment_ids": np.int32(real)},
            mask="mask",
            step=jax.jit(step),
            shift=50,
            bfloat16=True,
            **choices,
        )
    unchecked = {verdict.law for verdict in report if verdict.verdict == "not checked"}
    assert report and unchecked == {"blocks", "devices", "reference"} - choices.keys(), report


def test_the_first_wrong_gradient_of_a_long_input_is_a_token():
    @jax.jit
    def layer(x):
        late = jnp.arange(x.shape[1])[:, None] > 20
        return jnp.where(late[None], jax.lax.stop_gradient(x), x)

    verdict = check(layer, vectors(3), length=40)["gradients"]
    assert "the gradient of x at token 21 gives slope 0" in verdict.counterexample


@pytest.mark.parametrize("factor, verdict", [(1.0, "holds"), (1.03, "BROKEN")])
def test_gradients_are_compared_by_array(factor, verdict):
    """Slopes by k are a tenth of those by q."""

    @jax.custom_vjp
    def layer(q, k, v):
        return 7 * q + k * v

    def summed(q, k, v):
        return layer(q, k, v).cumsum(axis=1)

    layer.defvjp(
        lambda q, k, v: (layer(q, k, v), (k, v)),
        lambda kept, dout: (7 * dout, factor * dout * kept[1], dout * kept[0]),
    )
    assert check(jax.jit(summed))["gradients"].verdict == verdict


@pytest.mark.parametrize("seed", [4, 9])
def test_a_kink_is_no_wrong_gradient(seed):
    report = check(jax.jit(jax.nn.relu), vectors(16), seed=seed, laws=["gradients"])
    assert report["gradients"].verdict == "holds"


def test_slopes_of_16_bits_are_not_checked():
    verdict = check(jax.jit(lambda x: x.astype(jnp.bfloat16)), vectors(3))["gradients"]
    assert verdict.verdict == "not checked" and "check it in float32" in verdict.counterexample
    wide = jax.jit(lambda x: x.astype(jnp.float32))
    assert check(wide, vectors(3, dtype=np.float16))["gradients"].verdict == "not checked"


def test_two_draws_differ_in_every_entry():
    (first,), (other,) = tokens(2).two(seed=0, batch=4, length=16)
    assert {0, 1} == {*np.unique(first)} and (first != other).all()


MISTAKES = {
    "another shape": (
        lambda: check(lambda q, k, v: q[:, 0]),
        "float32[4, 16, 4, 8]: it must return [B, L, …] = [4, 16, …]",
    ),
    "a dict": (lambda: check(lambda q, k, v: {"out": q}), "returned a dict: return an array"),
    "raises": (
        lambda: check(lambda q, k: q),
        "<lambda>(float32[4, 16, 4, 8], float32[4, 16, 4, 8], float32[4, 16, 4, 8]) raised TypeError",
    ),
    "random": (
        lambda: check(lambda q, k, v: q + np.random.default_rng().normal(size=q.shape)),
        "turn dropout off",
    ),
    "ignores": (lambda: check(lambda q, k, v: 0 * q), "returns the same for all inputs"),
    "not finite": (lambda: check(lambda q, k, v: q / 0), "values that are not finite"),
    "no function": (lambda: check(3), "check takes a function, got int"),
    "law": (lambda: check(so_far, vectors(3), laws=["casuality"]), "did you mean 'causality'"),
    "inputs of arrays": (
        lambda: check(so_far, np.ones((4, 16, 3))),
        "inputs must be qkv(…), vectors(width), tokens(vocab), or a function (generator, batch, length)",
    ),
    "draws an array": (
        lambda: check(so_far, lambda rng, *size: rng.normal(size=(*size, 3))),
        "must return a tuple of arrays, got ndarray",
    ),
    "draws a shape": (
        lambda: check(so_far, lambda rng, batch, length: [np.ones((length, batch))]),
        "returned shape [16, 4] for input 0: it must be [4, 16, …]",
    ),
    "draw raises": (lambda: check(so_far, vectors), "inputs(generator, 4, 16) raised TypeError"),
    "laws of a string": (lambda: check(so_far, vectors(3), laws="causality"), "['causality']"),
    "no laws": (lambda: check(so_far, vectors(3), laws=[]), "at least one name, or None for all"),
    "tolerance": (
        lambda: check(so_far, vectors(3), tolerance=-1.0),
        "tolerance must be a number of at least 0, got -1.0",
    ),
    "tolerance of a word": (lambda: check(so_far, vectors(3), tolerance="a"), "least 0, got 'a'"),
    "length": (
        lambda: check(so_far, vectors(3), length=16.0),
        "length must be a whole number, got 16.0",
    ),
    "seed": (lambda: check(so_far, vectors(3), seed=-1), "seed must be at least 0, got -1"),
    "long lengths": (
        lambda: check(so_far, vectors(3), lengths=[32]),
        "lengths must be a list of whole numbers from 1 to length - 1 = 15, got [32]",
    ),
    "lengths": (lambda: check(so_far, vectors(3), lengths=5), "1 = 15, got 5"),
    "no blocks": (lambda: check(so_far, vectors(3), blocks=[]), "at least one dict of keywords"),
    "blocks of a dict": (lambda: check(so_far, vectors(3), blocks={"b": 3}), "got {'b': 3}"),
    "adapter": (lambda: check(so_far, vectors(3), segments=3), "segments must be a keyword's name"),
    "reference": (lambda: check(so_far, vectors(3), reference=3), "must be a function, got 3"),
    "complex": (lambda: check(lambda x: x * 1j, vectors(3)), "has the type complex64: return real"),
    "one example": (lambda: check(so_far, vectors(3), batch=1), "batch must be at least 2"),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("call, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_line(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_that_returns_no_dict_is_one_clear_line():
    verdict = check(so_far, vectors(3), segments=lambda ids: ids)["packed documents"]
    assert verdict.verdict == "failed" and "must return a dict of" in verdict.counterexample


def test_a_wrong_keyword_is_a_failed_law_and_not_a_broken_one():
    adapter = {"segments": lambda ids: {"document_ids": ids}}
    report = check(so_far_of_documents, vectors(3), **adapter)
    verdict = report["packed documents"]
    assert verdict.verdict == "failed" and "document_ids=…) raised TypeError" in (
        verdict.counterexample
    )
    assert report["causality"].verdict == "holds" and not report
    with pytest.raises(AssertionError, match="so_far_of_documents fails in packed documents"):
        report.raise_if_broken()


@pytest.mark.parametrize(
    "step, message",
    [
        (lambda cache, x: x, "step must return (out, cache), got ndarray"),
        (lambda cache, x: (x[:2], None), "step returned shape [2, 8, 3] for the tokens 0 to 7"),
        (lambda cache, x: (x, cache + 1), "step for the tokens 0 to 7(float32[4, 8, 3]) raised"),
    ],
)
def test_a_wrong_step_is_one_clear_line(step, message):
    verdict = check(so_far, vectors(3), step=step, laws=["decoding"])["decoding"]
    assert verdict.verdict == "failed" and message in verdict.counterexample
    assert "\n" not in verdict.counterexample


@pytest.mark.parametrize(
    "gradients, message",
    [
        (lambda arrays, dout: dout, "gradients returned a ndarray for 1 arrays"),
        (lambda arrays, dout: [], "gradients returned a list of 0 for 1 arrays: return a list of"),
        (lambda arrays, dout: [None], "gradients returned None for x: return an array of its"),
        (lambda arrays, dout: [0 * dout[0]], "gradients returned shape [16, 3] for x: return"),
    ],
)
def test_wrong_shapes_of_gradients_are_one_clear_line(gradients, message):
    verdict = check(lambda x: x, vectors(3), gradients=gradients)["gradients"]
    assert verdict.verdict == "failed" and message in verdict.counterexample


def test_a_reference_without_gradients_is_compared_by_values():
    reference = check(jax.jit(lambda x: 2.0 * x), vectors(3), reference=lambda x: np.multiply(2, x))
    assert reference["reference"].verdict == "holds"
    wrong = check(jax.jit(lambda x: 2.0 * x), vectors(3), reference=lambda x: np.multiply(3, x))
    assert wrong["reference"].verdict == "BROKEN"


def test_results_of_another_shape_fail():
    report = check(jax.jit(lambda x: 2.0 * x), vectors(3), reference=lambda x: x[..., :1])
    text = "a result has shape [4, 16, 1], and [4, 16, 3] is right"
    assert (report["reference"].verdict, report["reference"].counterexample) == ("failed", text)


def test_wrong_gradients_of_bfloat16_are_seen():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, dout: (5 * dout,))
    report = check(
        jax.jit(double), vectors(3, dtype=jnp.bfloat16), reference=jax.jit(lambda x: x + x)
    )
    assert report["reference"].verdict == "BROKEN"


def so_far_of_documents(x):
    return so_far(x)


def test_a_language_model_of_flax_with_a_leak():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(50, 8, rngs=rngs)
            self.out = nnx.Linear(8, 50, rngs=rngs)

        def __call__(self, tokens, segment_ids=None):
            x = self.embedding(tokens)
            return self.out(x + jnp.roll(x, 1, axis=1).at[:, 0].set(0))

    report = check(Model(nnx.Rngs(0)), tokens(50), segments="segment_ids")
    assert report["packed documents"].tokens == (4, 5) and report["causality"].verdict == "holds"


def test_modules_of_torch_are_taken_as_they_are_and_functions_are_wrapped():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x, ids=None):
            return self.linear(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]), "a cache"

    report = check(Layer(), vectors(4), segments="ids")
    assert report["packed documents"].tokens == (4, 5)
    assert report["gradients"].verdict == report["causality"].verdict == "holds"
    report = check(torch.nn.Embedding(9, 3), tokens(9))
    assert report and report["gradient leaks"].verdict == "not checked"
    model = torch.nn.Sequential(torch.nn.Embedding(9, 3))
    deeper = torch.nn.Sequential(*model, torch.nn.Linear(3, 3, bias=False))
    torch.nn.init.eye_(deeper[1].weight)  # the same function with more parameters
    assert check(model, tokens(9), reference=deeper)["reference"].verdict == "holds"
    one_hot = from_torch(lambda x: torch.nn.functional.one_hot(x, 9).float())
    assert check(one_hot, tokens(9))["gradients"].verdict == "not checked"
    with pytest.raises(ConfigError, match=r"pass tokens\(vocab\) for a language model"):
        check(torch.nn.Embedding(9, 3))
    report = check(from_torch(lambda x: x * torch.sigmoid(x.cumsum(1))), vectors(4), bfloat16=True)
    assert report["gradients"].verdict == "holds" and report
    with pytest.raises(ConfigError, match=r"cope_jax\.testing\.from_torch if it takes"):
        check(lambda x: torch.sigmoid(x), vectors(4))
