"""Recurrences by chunks equal the recurrence token by token, and the code of others."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops import linear_recurrence as module
from cope_jax.ops.linear_recurrence import linear_recurrence
from tests.ops.jaxprs import equations
from tests.oracle.differences import slopes
from tests.oracle.mixers import recurrence

BATCH, LENGTH = 2, 11
HEADS, WIDTH, VALUES = 2, 3, 4
SEGMENTS = np.array([[0] * 11, [0, 0, 3, 3, 3, 3, 3, 3, 3, 5, 5]], np.int32)
KINDS = {
    "linear": (0, False), "gla": (WIDTH, False),
    "delta": (0, True), "gated_delta": (1, True), "kda": (WIDTH, True),
}  # fmt: skip


def arrays(kind, seed=0, length=LENGTH):
    width, delta = KINDS[kind]
    rng = np.random.default_rng(seed)
    inputs = {
        name: rng.normal(size=(BATCH, length, HEADS, size))
        for name, size in zip("qkv", (WIDTH, WIDTH, VALUES), strict=True)
    }
    if width:
        inputs["decay"] = -rng.uniform(0, 1.5, (BATCH, length, HEADS, width))
    if delta:
        inputs["beta"] = rng.uniform(0, 2, (BATCH, length, HEADS))
    return inputs


def ours(given, segments=None, state=None):
    return linear_recurrence(
        given["q"], given["k"], given["v"], log_decay=given.get("decay"), beta_BLH=given.get("beta"),
        segment_ids_BL=segments, state=state,
    )  # fmt: skip


def exact(given, example, segments=SEGMENTS):
    row = {name: array[example] for name, array in given.items()}
    return recurrence(
        row["q"], row["k"], row["v"], row.get("decay"), row.get("beta"), segments[example]
    )


@pytest.mark.parametrize(
    "size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 64))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_the_oracle(kind, size, monkeypatch, x64):
    """Chunks that divide the length or do not; segments that begin within or between chunks."""
    monkeypatch.setattr(module, "CHUNK", size)
    monkeypatch.setattr(module, "VECTOR_CHUNK", size)
    given = arrays(kind)
    weights = np.random.default_rng(9).normal(size=(BATCH, LENGTH, HEADS, VALUES))

    def loss(given):
        out, _ = ours(given, SEGMENTS)
        return (out * weights).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    for example in range(BATCH):
        np.testing.assert_allclose(out[example], exact(given, example), rtol=0, atol=1e-12)
    if size != 4:
        return
    second = {name: array[1:] for name, array in given.items()}

    def numeric(row):
        both = {name: np.concatenate([given[name][:1], array]) for name, array in row.items()}
        return float((exact(both, 1) * weights[1]).sum())

    of_second = {name: array[1:] for name, array in gradients.items()}
    for name, slope, difference in slopes(numeric, second, of_second):
        np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if KINDS[kind][0] else pytest.mark.slow) for kind in KINDS],
)
def test_calls_in_a_row_give_what_one_call_gives(kind, monkeypatch, x64):
    for name in ("CHUNK", "VECTOR_CHUNK"):  # so that the last chunk is filled up
        monkeypatch.setattr(module, name, 3)
    given, outputs, state, first = arrays(kind), [], None, 0
    for size in (1, 4, 1, 5):
        window = {name: array[:, first : first + size] for name, array in given.items()}
        out, state = jax.jit(ours)(window, SEGMENTS[:, first : first + size], state)
        outputs.append(out)
        first += size
    whole, after = jax.jit(ours)(given, SEGMENTS)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.matrix, after.matrix, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(state.segment, SEGMENTS[:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_closed_gates_over_long_sequences(kind):
    """In float32: decays of −50 for each token, and 300 tokens, against the loop in float64."""
    given = arrays(kind, length=300)
    if "decay" in given:
        given["decay"][:, ::3] = -50.0
    if "beta" in given:
        given["k"] /= np.linalg.norm(given["k"], axis=-1, keepdims=True)
    out, _ = jax.jit(ours)({name: jnp.asarray(array, jnp.float32) for name, array in given.items()})
    expected = exact(given, 0, np.zeros((BATCH, 300), np.int32))
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "kind, folder, function",
    [
        ("linear", "linear_attn", "naive_chunk_linear_attn"),
        ("gla", "gla", "naive_recurrent_gla"),
        ("delta", "delta_rule", "delta_rule_recurrence"),
        ("gated_delta", "gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        ("kda", "kda", "naive_recurrent_kda"),
    ],
)
def test_the_code_of_flash_linear_attention_gives_the_same(kind, folder, function, x64):
    torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed")
    path = pathlib.Path(package.submodule_search_locations[0]) / "ops" / folder / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{folder}", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    given = arrays(kind, length=64)
    given["k"] /= np.linalg.norm(given["k"], axis=-1, keepdims=True)
    out, _ = jax.jit(ours)(given)
    q, k, v = (torch.tensor(given[name]) for name in "qkv")
    if kind == "linear":
        reference = getattr(theirs, function)(q, k, v)
    elif kind == "gla":
        reference = getattr(theirs, function)(q, k, v, torch.tensor(given["decay"]))
    elif kind == "delta":
        head_major = (x.transpose(1, 2) for x in (q, k, v, torch.tensor(given["beta"])))
        reference = getattr(theirs, function)(*head_major)
    elif kind == "kda":
        decay, beta = torch.tensor(given["decay"]), torch.tensor(given["beta"])
        reference = getattr(theirs, function)(q, k, v, decay, beta)
    else:
        reference = getattr(theirs, function)(
            q, k, v, torch.tensor(given["beta"]), torch.tensor(given["decay"][..., 0])
        )
    reference = reference[0] if isinstance(reference, tuple) else reference
    reference = reference.transpose(1, 2) if kind == "delta" else reference
    np.testing.assert_allclose(out, reference.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("beta", [None, 0.5])
def test_products_are_asked_for_in_full_precision(beta):
    """An accelerator would round the inputs of a product to fewer bits unless asked not to."""
    x = jnp.ones((1, 5, 2, 3))

    def outputs(x):
        rates = None if beta is None else jnp.full(x.shape[:3], beta)
        return linear_recurrence(x, x, x, log_decay=-x[..., :1], beta_BLH=rates)[0].sum()

    products = [e for e in equations(jax.grad(outputs), x) if e.primitive.name == "dot_general"]
    assert len(products) >= 8
    assert {e.params["precision"] for e in products} == {(jax.lax.Precision.HIGHEST,) * 2}
