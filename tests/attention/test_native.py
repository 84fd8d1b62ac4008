"""Attention in C++ says what full attention says, in value and every gradient; without a compiler,
XLA works.
"""

import functools
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from cope_jax import encodings
from cope_jax.attention import Reason, attend, full_attention, prepare
from cope_jax.attention.kernels.cpu import cpu_attention, library
from cope_jax.encodings.cope import CoPE
from cope_jax.errors import ConfigError
from tests.attention.problems import (
    DOCUMENTS,
    SHUFFLED,
    assert_equals_full,
    check_types_vmap_and_devices,
    ran,
)
from tests.encodings.cases import build
from tests.oracle.encodings import Sizes

needs_library = pytest.mark.usefixtures("native")
SIZES = Sizes(heads=4, kv_heads=2, head_dim=16, model_dim=6, max_length=200)


@pytest.fixture
def native():
    if reason := library.why_not():
        # An error of the compiler is in our source.
        (pytest.fail if "error:" in reason else pytest.skip)(reason)


def native_attention(encoding, request):
    return ran(cpu_attention.plan(encoding, request))


def why_not(encoding, request):
    answer = cpu_attention.plan(encoding, request)
    return answer.why if isinstance(answer, Reason) else None


compare = functools.partial(assert_equals_full, native_attention, sizes=SIZES)

SPECS = [
    "none",
    "rope",
    "learned+cope(npos_max=20)",
    "cope(npos_max=200)",
    "cope(npos_max=2)",
    "cope(npos_max=20,gate=value)+rope",
    "cope(npos_max=40,gate=separate_key,scale_position_logits=True)",
    "cope(position=slope)",
    "cope(position=learned_slope,gate=separate_key)",
]


@needs_library
def test_at_whole_positions_the_derivative_is_zero():
    compare("cope(npos_max=20)", 70, 70, no_keys=True)


@needs_library
@pytest.mark.parametrize("spec", SPECS)
def test_it_equals_full_attention(spec):
    compare(spec, 150, 150)


@needs_library
@pytest.mark.parametrize(
    ("spec", "length", "options"),
    [
        ("cope(npos_max=20)", 37, {}),  # fewer queries than keys
        ("cope(npos_max=20)", 180, {}),  # more queries than keys
        ("cope(npos_max=20)", 150, {"window": 30}),
        ("cope(npos_max=20)", 150, {"window": 20, "segments": DOCUMENTS}),
        ("none", 150, {"window": 70, "causal": False}),
        ("cope(npos_max=20)", 150, {"causal": False}),
        ("cope(npos_max=20)", 150, {"segments": DOCUMENTS}),
        ("rope", 150, {"segments": SHUFFLED, "causal": False}),
    ],
    ids=str,
)
def test_masks(spec, length, options):
    compare(spec, length, 150, **options)


@needs_library
def test_values_of_another_width():
    encoding = encodings.create("cope", num_heads=2, head_dim=16, npos_max=8, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, 128, 2, width)), jnp.float32) for width in (16, 16, 48)
    )

    def gradients(attention):
        out = jax.jit(lambda q, k, v: attention(encoding, prepare(q, k, v, encoding=encoding)))
        value, pull = jax.vjp(out, q, k, v)
        return value, *pull(jnp.cos(value))

    for computed, exact in zip(gradients(native_attention), gradients(full_attention), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=0, atol=2e-5)


@needs_library
def test_second_derivatives_are_refused_in_one_line():
    encoding = encodings.create("none", num_heads=1, head_dim=16, rngs=nnx.Rngs(0))

    def norm(q):
        return (native_attention(encoding, prepare(q, q, q, encoding=encoding)) ** 2).sum()

    with pytest.raises(ConfigError, match=r"in C\+\+ has first derivatives only: choose"):
        jax.hessian(norm)(jnp.ones((1, 4, 1, 16)))
    with pytest.raises(ConfigError, match="first derivatives only"):
        jax.grad(lambda q: (jax.grad(norm)(q) ** 2).sum())(jnp.ones((1, 4, 1, 16)))


@needs_library
@pytest.mark.parametrize(
    "sizes", [Sizes(2, 2, 80, 6, 200), Sizes(4, 1, 128, 6, 200), Sizes(1, 1, 32, 6, 200)], ids=str
)
def test_widths_and_groups_of_heads(sizes):
    compare("cope(npos_max=20)", 70, 70, sizes=sizes)


@needs_library
@pytest.mark.parametrize("logit", [400.0, -274.0])
def test_gates_that_are_all_open_or_all_closed(logit):
    """Gates of exactly 1 count tokens: 16 neighbours are at 16 different cells. Gates of 0 count
    nothing.

    The gate of key 47 is just below 1. The sum of this gate and 15 others rounds up, to a 17th
    cell.
    """
    graphdef, state = build("cope(npos_max=100)", sizes=SIZES, dtype=np.float32)
    q = jnp.full((1, 120, 4, 16), 10.0)
    k = (q * logit / 400)[:, :, :2].at[0, 47].set(0.403)
    v = jax.random.normal(jax.random.key(0), (1, 120, 2, 16))
    inputs = prepare(q, k, v, encoding=nnx.merge(graphdef, state))
    both = [
        attention(nnx.merge(graphdef, state), inputs)
        for attention in (native_attention, full_attention)
    ]
    np.testing.assert_allclose(*both, rtol=0, atol=2e-5)


@needs_library
def test_nan_stays_nan_in_its_row_and_elsewhere_there_is_none():
    graphdef, state = build("cope(npos_max=20)", sizes=SIZES, dtype=np.float32)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 100, 4, 16))
    inputs = prepare(
        q.at[0, 50, 1].set(jnp.nan), k[:, :, :2], k[:, :, :2], encoding=nnx.merge(graphdef, state)
    )
    out = np.asarray(native_attention(nnx.merge(graphdef, state), inputs))
    assert np.isnan(out[0, 50, 1]).all()
    assert np.isnan(out).sum() == 16


@needs_library
def test_a_query_that_sees_no_key_is_zero_and_its_gradient_too():
    encoding = encodings.create("cope", num_heads=2, head_dim=16, npos_max=8, rngs=nnx.Rngs(0))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 70, 2, 16))
    ids = jnp.zeros((1, 70), jnp.int32)

    def out(q, k):
        inputs = prepare(
            q, k, k, encoding=encoding, q_segment_ids=ids.at[0, 3].set(9), k_segment_ids=ids
        )
        return native_attention(encoding, inputs)

    value, pull = jax.vjp(out, q, k)
    dq, dk = pull(jnp.ones_like(value))
    assert not value[0, 3].any() and not dq[0, 3].any()
    assert np.isfinite(dq).all() and np.isfinite(dk).all()


@needs_library
def test_types_vmap_devices_and_remat():
    """bfloat16 results have its type; vmap calls C++ for each entry, and each device for its own
    examples.
    """
    graphdef, state = build("cope(npos_max=20)", sizes=SIZES, dtype=np.float32)
    encoding = nnx.merge(graphdef, state)
    out, inputs = check_types_vmap_and_devices(native_attention, why_not, encoding)
    gradients = [jax.vjp(f, *inputs)[1](out(*inputs)) for f in (out, jax.checkpoint(out))]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


@needs_library
def test_attend_takes_it_where_it_can_and_says_why_where_it_cannot():
    def reason(spec, dtype=jnp.float32, width=16, **options):
        encoding = encodings.create(
            spec, num_heads=2, head_dim=width, model_dim=32, rngs=nnx.Rngs(0)
        )
        x = jnp.ones((1, 70, 2, width), dtype)
        return why_not(encoding, prepare(x, x, x, encoding=encoding, embedded=True, **options))

    assert reason("cope") is None
    assert reason("sinusoidal+cope+rope", jnp.bfloat16) is None
    for spec in ("alibi", "cope_two_sided", "cope+alibi", "cope+kerple"):
        assert "cannot express what this encoding adds" in reason(spec)
    assert "widths of a head, (8, 8), are not multiples of 16" in reason("cope", width=8)
    assert "a mask is given" in reason("cope", mask=np.ones((1, 1, 70, 70), bool))
    ids = jnp.zeros((1, 70), jnp.uint8)
    assert reason("cope", q_segment_ids=ids, k_segment_ids=ids) is None  # of any integer type
    assert "no dropout" in reason("cope", dropout_rate=0.1, dropout_key=jax.random.key(0))
    encoding = encodings.create("cope", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 70, 2, 16))
    text = jax.jit(lambda x: attend(x, x, x, encoding=encoding)).lower(x).as_text()
    assert library.target("Forward") in text
    with pytest.raises(ConfigError, match="is not possible, because sizes of blocks are given"):
        attend(x, x, x, encoding=encoding, implementation="fused", blocks=(16, 16, 16))


def test_a_trace_asks_the_encoding_once(monkeypatch):
    """With its gradient, too, and if devices share the batch."""
    asked = []
    described = CoPE.native_score
    monkeypatch.setattr(CoPE, "native_score", lambda *call: asked.append(1) or described(*call))
    graphdef, state = build("cope(npos_max=20)+rope", sizes=SIZES, dtype=np.float32)
    q, k = jnp.ones((2, 70, 4, 16)), jnp.ones((2, 70, 2, 16))

    def loss(state, q, **options):
        return attend(q, k, k, encoding=nnx.merge(graphdef, state), **options).sum()

    jax.eval_shape(loss, state, q)
    assert asked == [1]
    jax.eval_shape(jax.grad(loss), state, q)
    assert asked == [1, 1]
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        jax.eval_shape(functools.partial(loss, batch_axes=("data",)), state, q)
    assert asked == [1, 1, 1]


def test_an_encoding_that_changes_how_cope_scores_is_not_taken_for_cope():
    class Doubled(CoPE):
        def score(self, pairs, carry):
            logits, carry = super().score(pairs, carry)
            return 2 * logits, carry

    class Closed(CoPE):
        def _gates(self, pairs):
            return 0 * super()._gates(pairs)

    class Restated(Closed):
        _gates = CoPE._gates
        native_score = CoPE.native_score

    shape = encodings.AttentionShape(2, 16)
    v = jnp.zeros((1, 5, 2, 16))
    kinds = (Doubled, Closed, Restated)
    scores = [kind(CoPE.Config(), shape, rngs=nnx.Rngs(0)).native_score(v, ()) for kind in kinds]
    assert [score is None for score in scores] == [True, True, False]


CASES = """
from pathlib import Path
from cope_jax.attention.kernels.cpu import library
library._compiled = lambda: Path({path!r})
from tests.attention import test_native as cases
assert library.why_not() is None, library.why_not()
for spec in cases.SPECS:
    cases.compare(spec, 150, 150)
cases.compare("cope(npos_max=20)", 37, 150, window=30)
cases.compare("cope(npos_max=20)", 150, 150, segments="documents")
cases.compare("none", 150, 150, window=70, causal=False)
cases.compare("cope(npos_max=20)", 70, 70, sizes=cases.Sizes(2, 2, 80, 6, 200))
cases.test_nan_stays_nan_in_its_row_and_elsewhere_there_is_none()
print("all cases ran")
"""


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        (
            "g++",
            ["-march=native", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
        ),
        ("g++", ["-march=x86-64-v3", "-O3"]),
        ("g++", ["-march=x86-64-v2", "-O3"]),  # vectors of 128 bits, as NEON has
        ("clang++", ["-march=native", "-O3"]),
        ("clang++", ["-march=x86-64-v3", "-O3"]),
    ],
    ids=["sanitizers", "AVX2", "128 bits", "clang", "clang, AVX2"],
)
def test_other_ways_to_compile(compiler, flags, tmp_path):
    """The same results; addresses and undefined behaviour are checked."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    path = tmp_path / "library.so"
    library._compile([compiler, *library.FLAGS[2:], *flags], path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if "-g" in flags:
        computed = (
            subprocess.run(
                [compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True
            ).stdout.strip()
            for name in ("asan", "ubsan")
        )
        environment |= {"LD_PRELOAD": " ".join(computed), "ASAN_OPTIONS": "detect_leaks=0"}
    program = CASES.format(path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "all cases ran" in done.stdout, done.stderr[-3000:]
    assert "runtime error" not in done.stderr
