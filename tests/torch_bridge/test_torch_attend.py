"""`cope_jax.torch.attend`: values and gradients are those of `cj.attend`, without copies."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
from tests.encodings.cases import CASES, every

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
from cope_jax.torch import Encoding, attend, torch_module, torch_program  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch_attend")
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "model_dim": 8, "max_length": 12}
LENGTH = 6


def encoding_of(spec, dtype=torch.float64, **sizes):
    """An encoding with random parameters."""
    torch.manual_seed(0)
    encoding = Encoding(spec, **{**SIZES, **sizes})
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return encoding.to(dtype)


def tensors(length=LENGTH, batch=2, dtype=torch.float64, **sizes):
    """q, k, v and x, which need gradients."""
    sizes = {**SIZES, **sizes}
    torch.manual_seed(1)
    shapes = [
        (sizes["num_heads"], sizes["head_dim"]),
        *[(sizes["num_kv_heads"], sizes["head_dim"])] * 2,
    ]
    made = [
        torch.randn(batch, length, *shape, dtype=torch.float64)
        for shape in (*shapes, (sizes["model_dim"],))
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def array(x):
    return x.detach().numpy().copy()


def in_jax(encoding, q, k, v, **given):
    """The same call in JAX: the result, and a function from a cotangent to gradients."""
    graph, state = nnx.split(torch_program.create(encoding.spec, 0))
    params = {name: jnp.asarray(array(x)) for name, x in encoding.named_parameters()}
    options = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
    arrays = {
        name: jnp.asarray(array(x)) for name, x in given.items() if isinstance(x, torch.Tensor)
    }
    q, k, v = (jnp.asarray(array(x)) for x in (q, k, v))

    def call(params, arrays, q, k, v):
        flat = [
            (path, leaf.replace(params[".".join(path)])) for path, leaf in nnx.to_flat_state(state)
        ]
        merged = nnx.merge(graph, nnx.from_flat_state(flat))
        return cj.attend(q, k, v, encoding=merged, **arrays, **options)

    return jax.vjp(jax.jit(call), params, arrays, q, k, v)


@every(CASES, few=())
def test_values_and_gradients_are_those_of_jax(spec, x64):
    encoding, (q, k, v, x) = encoding_of(spec), tensors()
    given = {"x": x, "embedded": True, "causal": True}
    out = attend(q, k, v, encoding=encoding, **given)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    parameters = dict(encoding.named_parameters())
    inputs = [q, k, v, x, *parameters.values()]
    gradients = torch.autograd.grad(out, inputs, cotangent, allow_unused=True)
    expected, pull = in_jax(encoding, q, k, v, **given)
    of_params, of_arrays, *of_qkv = pull(jnp.asarray(array(cotangent)))
    np.testing.assert_allclose(array(out), expected, rtol=0, atol=1e-12)
    for gradient, other in zip(
        gradients, [*of_qkv, of_arrays["x"], *(of_params[name] for name in parameters)], strict=True
    ):
        np.testing.assert_allclose(array(gradient), other, rtol=0, atol=1e-11)


def test_the_examples_of_the_docstrings():
    for module in (torch_module,):
        assert doctest.testmod(module).failed == 0


OPTIONS = {
    "window": {"window": 3},
    "cap, scale": {"scale": 0.3, "logits_soft_cap": 2.0},
    "both sides": {"causal": False},
    "blocks": {"implementation": "blockwise", "blocks": (4, 4, 4)},
}


@pytest.mark.parametrize(
    "name", ["window", *(pytest.param(x, marks=pytest.mark.slow) for x in list(OPTIONS)[1:])]
)
def test_options_are_those_of_jax(name, x64):
    encoding, (q, k, v, _) = encoding_of("cope(npos_max=4)"), tensors()
    out = attend(q, k, v, encoding=encoding, **OPTIONS[name])
    expected, _ = in_jax(encoding, q, k, v, **OPTIONS[name])
    np.testing.assert_allclose(array(out), expected, rtol=0, atol=1e-12)


def test_every_tensor_of_attend_is_passed_on(x64):
    """Fewer queries than keys, a bias with a gradient, a mask, positions, segments, and dropout."""
    encoding, (q, k, v, _) = encoding_of("cope(npos_max=4)+rope"), tensors()
    q = q[:, 2:]
    rng = np.random.default_rng(0)
    given = {
        "bias": torch.from_numpy(rng.normal(size=(1, 4, 4, 6))).requires_grad_(),
        "mask": torch.from_numpy(rng.random((2, 1, 4, 6)) < 0.8),
        "q_positions": torch.tensor([[2, 4, 5, 7]]),
        "k_positions": torch.tensor([[0, 1, 2, 4, 5, 7]]),
        "q_segment_ids": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.uint8),
        "k_segment_ids": torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]),
    }
    out = attend(q, k, v, encoding=encoding, **given)
    cotangent = torch.ones_like(out)
    (of_bias,) = torch.autograd.grad(out, given["bias"], cotangent)
    given = {
        n: x.int() if not x.is_floating_point() and n != "mask" else x for n, x in given.items()
    }
    expected, pull = in_jax(encoding, q, k, v, **given)
    np.testing.assert_allclose(array(out), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(array(of_bias), pull(jnp.ones(out.shape))[1]["bias"], atol=1e-12)


@pytest.mark.slow
def test_dropout_is_drawn_by_the_generator_of_pytorch():
    encoding, (q, k, v, _) = encoding_of("alibi", torch.float32), tensors(dtype=torch.float32)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v, encoding=encoding, dropout_rate=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    key = torch.tensor([3, 4], dtype=torch.int32)
    out = attend(q, k, v, encoding=encoding, dropout_rate=0.5, dropout_key=key)
    drop = {"dropout_rate": 0.5, "dropout_key": jnp.array([3, 4], jnp.uint32)}
    expected, _ = in_jax(encoding, q, k, v, **drop)
    np.testing.assert_allclose(array(out), expected, atol=1e-6)


def test_gradients_are_those_of_differences():
    encoding, (q, k, v, _) = encoding_of("cope(npos_max=4)"), tensors(length=4, batch=1)

    def of(q, k, v, table):
        return torch.func.functional_call(encoding, {"table": table}, (q, k, v))

    assert torch.autograd.gradcheck(of, (q, k, v, encoding.table))
