"""The methods of others equal the code of others: flash-linear-attention, x-transformers and
transformers.
"""

import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings
from tests.encodings.cases import SIZES, build, features_of, problem

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
LENGTH = 9


def fla(name):
    """The plain reference of an operation; its package would import Triton beside it."""
    package = importlib.machinery.PathFinder.find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed")
    path = pathlib.Path(package.submodule_search_locations[0]) / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def x_transformers():
    return pytest.importorskip(
        "x_transformers.x_transformers", reason="x-transformers is not installed"
    )


def tensor(x):
    return torch.tensor(np.asarray(x, np.float64))


def close(actual, exact, atol=1e-12):
    np.testing.assert_allclose(np.asarray(actual), exact.detach().numpy(), rtol=0, atol=atol)


class Ours:
    """The arrays of one problem, our encoding, its features, and full attention with it."""

    def __init__(self, spec, length=LENGTH):
        self.encoding = nnx.merge(*build(spec))
        arrays = problem(length=length)
        self.x, self.q, self.k, self.v = (jnp.asarray(arrays[name]) for name in "xqkv")
        self.features = features_of(self.encoding, self.x, self.q, self.k, self.v)

    def __call__(self, **options):
        return jax.jit(
            lambda q, k, v: attention.attend(
                q,
                k,
                v,
                encoding=self.encoding,
                x=self.x,
                embedded=True,
                implementation="full",
                **options,
            )
        )(self.q, self.k, self.v)


def test_fox(x64):
    ours = Ours("fox")
    exact = fla("forgetting_attn").naive_forgetting_attn(
        *map(tensor, (ours.q, ours.k, ours.v, ours.features))
    )
    close(ours(), exact, 1e-6)  # theirs is in float32


@pytest.mark.parametrize("spec", ["path", "path(forget=True)"])
def test_path(spec, x64):
    """Theirs also divides the sum of log f by √K: with log f times √K, it is the method of the
    paper.
    """
    ours = Ours(spec, length=20)
    log_f = ours.features.get("log_f", jnp.zeros(ours.q.shape[:3])) * SIZES.head_dim**0.5
    arrays = (ours.q, ours.k, ours.v, ours.features["w"], ours.features["beta"], log_f)
    exact = fla("path_attn").naive_path_attn(
        *map(tensor, arrays), scale=SIZES.head_dim**-0.5, chunk_size=8
    )
    close(ours(), exact, 2e-6)


def test_wall(x64, monkeypatch):
    """The constant and the cumulative sum that theirs imports lie beside Triton kernels, so they
    are given here.
    """
    to_log2 = 1 / np.log(2)

    def cumulative(g, cu_seqlens, scale):
        return torch.cumsum(g, 1) * scale

    for name, field, value in (
        ("constant", "RCP_LN2", to_log2),
        ("cumsum", "chunk_global_cumsum", cumulative),
    ):
        monkeypatch.setitem(
            sys.modules, f"fla.ops.utils.{name}", types.SimpleNamespace(**{field: value})
        )
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    ours = Ours("wall(bias=1.0,stddev=0.5)", length=40)
    arrays = map(tensor, (ours.q, ours.k, ours.v, ours.features))
    # Theirs is in float32.
    close(ours(), fla("wall_attn").naive_wall_attn(*arrays, scale=SIZES.head_dim**-0.5), 1e-5)


@pytest.mark.parametrize("see_itself", [False, True])
def test_stick_breaking(see_itself, x64):
    ours = Ours(f"stick_breaking(see_itself={see_itself})")
    q, k, v = map(tensor, (ours.q, ours.k, ours.v))
    out, rest = fla("stickbreaking_attn").naive_stickbreaking_attn(
        q, k, v, attend_current=see_itself
    )
    close(ours(), out)
    with_rest = Ours(f"stick_breaking(see_itself={see_itself},remainder=own)")
    close(with_rest(), out + rest[..., None] * v.repeat_interleave(2, dim=2))


def added(ours):
    """The encoding's term of the logits."""
    pairs = attention.prepare(ours.q, ours.k, ours.v, encoding=ours.encoding, x=ours.x).pairs()
    logits, _ = ours.encoding.score(pairs, ours.encoding.initial_carry(pairs.q, pairs.q_features))
    return np.where(pairs.mask, logits - pairs.logits, 0)


def test_row_fox(x64):
    ours = Ours("row_fox")
    theirs = x_transformers().PerRowDataDependentAlibi(SIZES.model_dim, SIZES.heads).double()
    kernels = np.stack([ours.encoding.query[...], ours.encoding.key[...]], axis=1)
    weight = np.moveaxis(kernels, 0, -1).reshape(-1, SIZES.model_dim)
    theirs.to_forget_gates[0].weight.data = tensor(weight)
    close(added(ours), theirs(tensor(ours.x)).tril())


def test_selective(x64):
    x_transformers()
    from x_transformers.attend import selective_attn

    ours = Ours("selective")
    k = np.repeat(ours.k, 2, axis=2)
    logits = np.einsum("blhk,bmhk->bhlm", ours.q, k) / SIZES.head_dim**0.5
    logits = np.where(np.tri(LENGTH, dtype=bool), logits, -1e300)
    exact = selective_attn(tensor(logits)) - tensor(logits)
    close(added(ours), exact.tril())


def test_pope(x64):
    ours = Ours("pope")
    outside = -8.0, 0.5  # of [−2π, 0]
    ours.encoding.phase[...] = jnp.asarray(ours.encoding.phase[...]).at[0, :2].set(outside)
    theirs = x_transformers()
    polar = theirs.PolarEmbedding(SIZES.head_dim, SIZES.kv_heads).double()
    polar.learned_bias.data = tensor(ours.encoding.phase[...])[:, None]
    angles, bias = polar(torch.arange(LENGTH))
    q, k = (tensor(np.swapaxes(x, 1, 2)) for x in (ours.q, ours.k))
    # Theirs is in float32.
    turned_q = theirs.apply_polar_pos_emb(
        q, angles[:, None].expand(2, 1, -1, -1)[:, 0][:, None].squeeze(1)[:, None]
    )
    turned_k = theirs.apply_polar_pos_emb(k, (angles[:, None] + bias))
    exact = turned_q @ turned_k.repeat_interleave(2, dim=1).transpose(-1, -2) / SIZES.head_dim**0.5
    pairs = attention.prepare(ours.q, ours.k, ours.v, encoding=ours.encoding).pairs()
    close(pairs.logits, exact, 2e-5)


def test_xpos(x64):
    rotary = x_transformers().RotaryEmbedding(16, use_xpos=True)
    _, scale = rotary(torch.arange(LENGTH))
    rope = encodings.create("rope(decay=512)", num_heads=1, head_dim=16, rngs=nnx.Rngs(0))
    pairs = jnp.ones((1, LENGTH, 1, 16))
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    q, k = rope.rotate(pairs, (), positions), rope.rotate_keys(pairs, (), positions)
    # The length of each pair; theirs are equal but for the middle of the sequence, which cancels
    # between q and k.
    sizes = [np.hypot(x[0, :, 0, :8], x[0, :, 0, 8:]) / np.sqrt(2) for x in (q, k)]
    middle = LENGTH // 2
    theirs = scale.reshape(-1, LENGTH, scale.shape[-1])[0].numpy()[:, ::2]
    np.testing.assert_allclose(sizes[0] / sizes[0][middle], theirs, atol=1e-6)
    np.testing.assert_allclose(sizes[1] / sizes[1][middle], 1 / theirs, atol=1e-6)


@pytest.mark.parametrize(
    "options, theirs",
    [
        ("interpolation=4.0", {"rope_type": "linear", "factor": 4.0}),
        ("yarn=(4,64),yarn_ramp=bands", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        (
            "longrope=(1.0,1.5,2.0,4.0),magnitude=1.1",
            {"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0] * 4,
             "attention_factor": 1.1, "original_max_position_embeddings": 64},
        ),
        ("ntk=4.0", None),
    ],
    ids=["interpolation", "yarn", "longrope", "ntk"],
)  # fmt: skip
def test_extensions_of_rope(options, theirs, x64):
    width = 8
    if theirs is None:  # position interpolation of the base: Bloc97's formula, for the slowest band
        rates, magnitude = (
            10_000.0 ** (-np.arange(0, width, 2) / width) / 4.0 ** (np.arange(4) / 3),
            1.0,
        )
    else:
        utilities = pytest.importorskip(
            "transformers.modeling_rope_utils", reason="transformers is not installed"
        )
        llama = pytest.importorskip("transformers").LlamaConfig(
            hidden_size=width, num_attention_heads=1, max_position_embeddings=256,
            rope_parameters={"rope_theta": 10_000.0, **theirs},
        )  # fmt: skip
        if theirs["rope_type"] == "linear":
            rates, magnitude = 10_000.0 ** (-np.arange(0, width, 2) / width) / 4.0, 1.0
        else:
            inverse, magnitude = utilities.ROPE_INIT_FUNCTIONS[theirs["rope_type"]](
                llama, "cpu", seq_len=256
            )
            rates = inverse.numpy()
    rope = encodings.create(f"rope({options})", num_heads=1, head_dim=width, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 1, 1, width)).at[..., : width // 2].set(1.0)
    position = np.ones((1, 1), np.int32)
    turned = rope.rotate(x, (), position)
    np.testing.assert_allclose(turned[0, 0, 0, 4:], magnitude * np.sin(rates), rtol=2e-6)
    np.testing.assert_allclose(turned[0, 0, 0, :4], magnitude * np.cos(rates), rtol=2e-6)
