"""Generated C++ says what full attention says, in value and every gradient, for every encoding that a
tile program can express.
"""

import dataclasses
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

from cope_jax import encodings
from cope_jax.attention import Reason, attend, full_attention, prepare
from cope_jax.attention.kernels.cpu import cpp_attention, library
from cope_jax.errors import ConfigError
from tests.attention.problems import (
    DOCUMENTS,
    SHUFFLED,
    assert_equals_full,
    check_types_vmap_and_devices,
    ran,
)
from tests.attention.test_fused import reason
from tests.encodings.cases import CASES, build, every
from tests.models import cases as decoders
from tests.oracle.encodings import Sizes

SIZES = Sizes(heads=4, kv_heads=2, head_dim=16, model_dim=8, max_length=200)
FEW = ["cope(npos_max=3)", "fox", "alibi", "stick_breaking"]
LONG = "cope(npos_max=200)"  # its table grows
SCALED = "cope(npos_max=100,gate=separate_key,scale_position_logits=True)"

pytestmark = pytest.mark.usefixtures("quickly")
SHIPPED = library.KERNEL_FLAGS


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setenv(library.SETTING, "1")
    if reason := library.why_not():
        lacks = any(words in reason for words in ("no C++ compiler", "neither AVX2 nor NEON"))
        (pytest.skip if lacks and "CI" not in os.environ else pytest.fail)(reason)


@pytest.fixture
def quickly(native, monkeypatch):
    """Compiles with fewer optimizations: here only the numbers count."""
    flags = ["-Og" if flag == "-O3" else flag for flag in library.KERNEL_FLAGS]
    monkeypatch.setattr(library, "KERNEL_FLAGS", flags)


@pytest.fixture
def traced_only(monkeypatch):
    """Kernels are printed, but not compiled: for tests that run none."""
    monkeypatch.setattr(library, "load_kernel", lambda text: "digest")


def generated(encoding, request):
    return ran(planned(encoding, request))


def planned(encoding, request):
    return cpp_attention.plan(encoding, dataclasses.replace(request, implementation="fused"))


def why_not(encoding, request):
    answer = planned(encoding, request)
    return answer.why if isinstance(answer, Reason) else None


compare = functools.partial(assert_equals_full, generated, sizes=SIZES)

# Without those for heads of width 4, and whose table is too long.
ALL = [spec for spec in CASES if "longrope" not in spec and spec != "relative"]


@every(ALL, few=["cope(npos_max=3)", "stick_breaking"])
def test_every_encoding(spec, quickly):
    """In blocks of 16; other tests have 150 tokens, and blocks of 32."""
    why = reason(spec)
    if why is not None:
        with pytest.raises(AssertionError, match=why):  # it has no plan
            compare(spec, 144, 144)
        return
    # The gradient of FIRE's last bias is 0: a sum of 45,000 numbers up to 1 that cancel.
    compare(spec, 144, 144, atol=6e-5, least=1.0 if "fire" in spec else 1e-3)


@pytest.mark.parametrize(
    ("spec", "length", "options"),
    [
        # Fewer queries than keys, and more.
        pytest.param("cope(npos_max=3)", 37, {"window": 100}, marks=pytest.mark.slow),
        pytest.param("cope(npos_max=3)", 180, {}, marks=pytest.mark.slow),
        ("cope(npos_max=3)", 150, {"window": 20, "segments": DOCUMENTS}),
        pytest.param("alibi", 150, {"window": 70, "causal": False}, marks=pytest.mark.slow),
        ("alibi", 150, {"segments": SHUFFLED, "causal": False, "scale": 0.3}),
        pytest.param("fox", 150, {"segments": DOCUMENTS}, marks=pytest.mark.slow),
        pytest.param("kerple", 150, {"logits_soft_cap": 2.0}, marks=pytest.mark.slow),
        pytest.param("cope(npos_max=20)", 300, {}, marks=pytest.mark.slow),  # blocks of 64
        pytest.param(LONG, 150, {"segments": DOCUMENTS}, marks=pytest.mark.slow),
        pytest.param(SCALED, 150, {}, marks=pytest.mark.slow),
        pytest.param("cope(npos_max=20)", 150, {"causal": False}, marks=pytest.mark.slow),
        pytest.param("none", 150, {"window": 70, "causal": False}, marks=pytest.mark.slow),
        # Positions that are real numbers.
        pytest.param("grape_additive", 150, {"step": 0.7}, marks=pytest.mark.slow),
        pytest.param("fire", 150, {"step": 0.7, "least": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks_and_scales(spec, length, options):
    compare(spec, length, 150, **options)


@pytest.mark.parametrize(
    "spec", ["cope(npos_max=3)", pytest.param("stick_breaking", marks=pytest.mark.slow)]
)
def test_blocks_of_queries_that_visit_keys_together(spec):
    """With so many heads eight blocks do in the forward pass too, unless there are many threads, and
    the ninth is alone.
    """
    compare(spec, 144, 144, sizes=SIZES._replace(heads=16), window=40, segments=DOCUMENTS)


@pytest.fixture
def tiles(native, monkeypatch):
    """Takes the matrix unit of the CPU, or loops in its place. Returns the texts of kernels."""
    if not library.has_tiles():
        monkeypatch.setattr(library, "has_tiles", lambda: True)
    texts, load = [], library.load_kernel
    monkeypatch.setattr(library, "load_kernel", lambda text: texts.append(text) or load(text))
    return texts


@pytest.mark.parametrize("rate", [0.4])
def test_dropout(rate):
    """Every pair is dropped that full attention drops."""
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 100, 2, 16))

    def gradients(attention):
        def out(q, k, v):
            options = {"dropout_rate": rate, "dropout_key": jax.random.key(1)}
            return attention(encoding, prepare(q, k, v, encoding=encoding, **options))

        value, pull = jax.vjp(jax.jit(out), q, k, v)
        return value, *pull(jnp.cos(value))

    for computed, exact in zip(gradients(generated), gradients(full_attention), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 1, 24, 6, 200),  # no vector of 16 numbers divides the width
        pytest.param(Sizes(1, 1, 5, 6, 200), marks=pytest.mark.slow),
        pytest.param(Sizes(4, 4, 80, 6, 200), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_widths_and_groups_of_heads(sizes):
    compare("cope(npos_max=20)", 77, 77, sizes=sizes)


@pytest.mark.slow
def test_a_table_grows_no_further_than_the_positions(monkeypatch):
    """Columns beyond may be NaN, in the gradient too."""
    texts, load = [], library.load_kernel
    monkeypatch.setattr(library, "load_kernel", lambda text: texts.append(text) or load(text))
    encoding = nnx.merge(*build(LONG, sizes=SIZES, dtype=np.float32))
    encoding.table[...] = jnp.asarray(encoding.table[...]).at[150:].set(jnp.nan)
    q = jax.random.normal(jax.random.key(0), (1, 100, 4, 16))

    def loss(q):
        k = q[:, :, :2]
        return jnp.sin(generated(encoding, prepare(q, k, k, encoding=encoding))).sum()

    assert np.isfinite(jax.jit(jax.grad(loss))(q)).all()
    assert texts and all(" grow_" in text for text in texts)


def test_a_decoder_is_trained_by_it_unless_told_otherwise(traced_only, monkeypatch):
    graph, state = decoders.build(decoders.config("alibi", max_length=100, remat="dots"))

    def program():
        def loss(state):
            logits = nnx.merge(graph, state)(np.zeros((1, 100), np.int32))
            return jnp.sum(logits**2)

        return jax.jit(jax.grad(loss)).lower(state).as_text()

    monkeypatch.delenv(library.SETTING)
    assert library.target() in program()
    monkeypatch.setenv(library.SETTING, "0")
    assert library.target() not in program()


def test_at_whole_positions_the_derivative_is_zero():
    compare(LONG, 150, 150, no_keys=True)


@pytest.mark.parametrize("logit", [400.0, pytest.param(-274.0, marks=pytest.mark.slow)])
def test_gates_that_are_all_open_or_all_closed(logit):
    """Gates of exactly 1 count tokens: 16 neighbours are at 16 different cells. Gates of 0 count
    nothing.

    The gate of key 47 is just below 1. The sum of this gate and 15 others rounds up, to a 17th
    cell.
    """
    graphdef, state = build(LONG, sizes=SIZES, dtype=np.float32)
    q = jnp.full((1, 120, 4, 16), 10.0)
    k = (q * logit / 400)[:, :, :2].at[0, 47].set(0.403)
    v = jax.random.normal(jax.random.key(0), (1, 120, 2, 16))

    @jax.jit
    def both(q, k, v):
        encoding = nnx.merge(graphdef, state)
        inputs = prepare(q, k, v, encoding=encoding)
        return [attention(encoding, inputs) for attention in (generated, full_attention)]

    np.testing.assert_allclose(*both(q, k, v), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_query_that_sees_no_key_is_zero_and_its_gradient_too():
    encoding = encodings.create("cope", num_heads=2, head_dim=16, npos_max=8, rngs=nnx.Rngs(0))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 70, 2, 16))
    ids = jnp.zeros((1, 70), jnp.int32)

    def out(q, k):
        inputs = prepare(
            q, k, k, encoding=encoding, q_segment_ids=ids.at[0, 3].set(9), k_segment_ids=ids
        )
        return generated(encoding, inputs)

    value, pull = jax.vjp(out, q, k)
    dq, dk = pull(jnp.ones_like(value))
    assert not value[0, 3].any() and not dq[0, 3].any()
    assert np.isfinite(dq).all() and np.isfinite(dk).all()


def test_nan_stays_in_its_row_and_reads_no_other_memory():
    graphdef, state = build(LONG, sizes=SIZES, dtype=np.float32)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 100, 4, 16))
    inputs = prepare(
        q.at[0, 50, 1].set(jnp.nan), k[:, :, :2], k[:, :, :2], encoding=nnx.merge(graphdef, state)
    )
    out = np.asarray(generated(nnx.merge(graphdef, state), inputs))
    assert np.isnan(out[0, 50, 1]).all()
    assert np.isnan(out).sum() == 16


def test_types_vmap_devices_remat_and_several_calls_at_once():
    """bfloat16 results have its type; vmap calls C++ for each entry, and each device for its own
    examples.
    """
    encoding = nnx.merge(*build("alibi", sizes=SIZES, dtype=np.float32))
    atol = 0.02 if library.has_tiles() else 0.0
    out, inputs = check_types_vmap_and_devices(generated, why_not, encoding, atol)
    gradients = [jax.vjp(f, *inputs)[1](out(*inputs)) for f in (out, jax.checkpoint(out))]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


@pytest.mark.slow  # the check of the library does so too
def test_with_the_flags_that_users_have(monkeypatch):
    monkeypatch.setattr(library, "KERNEL_FLAGS", SHIPPED)
    compare("cope(npos_max=3)", 150, 150)


@pytest.mark.slow
def test_second_derivatives_by_forward_mode_only():
    encoding = encodings.create("alibi", num_heads=1, head_dim=16, rngs=nnx.Rngs(0))

    def norm(attention):
        return lambda q: (attention(encoding, prepare(q, q, q, encoding=encoding)) ** 2).sum()

    q = jax.random.normal(jax.random.key(0), (1, 4, 1, 16), jnp.float32)
    slope = jax.jvp(jax.grad(norm(generated)), (q,), (q,))[1]
    with jax.enable_x64(True):
        wide = jnp.float64(q)
        exact = jax.jvp(jax.grad(norm(full_attention)), (wide,), (wide,))[1]
    np.testing.assert_allclose(slope, exact, rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match=r"take jax\.jvp of jax\.grad, or choose"):
        jax.grad(lambda q: jax.grad(norm(generated))(q).sum())(q)


def test_attend_takes_it_where_it_can_and_says_why_where_it_cannot(traced_only):
    def reason(spec="alibi", dtype=jnp.float32, **options):
        encoding = encodings.create(spec, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
        x = jnp.ones((1, 70, 2, 16), dtype)
        return why_not(encoding, prepare(x, x, x, encoding=encoding, embedded=True, **options))

    assert reason() is None and reason("relative(max_distance=100)") is None
    assert reason("sinusoidal+cope+rope", jnp.bfloat16) is None
    ids = jnp.zeros((1, 70), jnp.uint8)
    assert reason(q_segment_ids=ids, k_segment_ids=ids) is None  # of any integer type
    assert "a mask is given" in reason(mask=np.ones((1, 1, 70, 70), bool))
    assert "a bias is given" in reason(bias=np.ones((1, 1, 70, 70), np.float32))
    assert "a type is float16" in reason(dtype=jnp.float16)
    assert "all keys in one block" in reason("cope_two_sided")
    assert "by a long table" in reason("relative(max_distance=500)")
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 70, 2, 16))

    def run(x, **options):
        return attend(x, x, x, encoding=encoding, **options)

    text = jax.jit(functools.partial(run, implementation="fused")).lower(x).as_text()
    assert library.target() in text
    assert library.target() in jax.jit(run).lower(x).as_text()
    assert library.target() not in jax.jit(run).lower(x[:, :63]).as_text()  # too few pairs
    with pytest.raises(ConfigError, match="is not possible, because sizes of blocks are given"):
        run(x, implementation="fused", blocks=(16, 16, 16))


def test_blocks_have_few_rows_without_a_query():
    sizes = [cpp_attention._sizes(n).queries for n in (64, 65, 80, 81, 256, 257)]
    assert sizes == [32, 16, 16, 32, 32, 64]


PROGRAM = """
from tests.attention import test_generated as cases
for spec in ("cope(npos_max=3)", "cope(npos_max=100)", "stick_breaking", "relative(max_distance=3)", "fox"):
    cases.compare(spec, 150, 150, atol={atol})
for spec in ("cope_signed(npos_max=9)", "cope_signed(npos_max=64)"):
    cases.compare(spec, 150, 150, atol={atol})
cases.compare("t5", 37, 150, window=30)
cases.compare("cope(npos_max=20)", 300, 300)
cases.compare("cope(npos_max=20)", 150, 150, segments="documents")
cases.compare("cope(npos_max=20)", 70, 70, sizes=cases.Sizes(2, 1, 24, 6, 200))
cases.compare("cope(npos_max=100)", 70, 70, dtype=cases.np.float64, atol=1e-12, dropout_rate=0.4)
cases.test_nan_stays_in_its_row_and_reads_no_other_memory()
print("all cases ran")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        ("g++", ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]),
        ("g++", ["-O1", "-march=x86-64-v3"]),
        ("g++", ["-O1", "-march=x86-64-v2", "-D__ARM_NEON"]),  # vectors of 128 bits, as NEON has
        ("clang++", ["-O1"]),
    ],
    ids=["sanitizers", "AVX2", "128 bits", "clang"],
)
def test_other_ways_to_compile(compiler, flags, tmp_path):
    """The same results; addresses and undefined behaviour are checked."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    last = tmp_path / compiler  # the later of two contrary flags counts
    last.write_text(f'#!/bin/sh\nexec {shutil.which(compiler)} "$@" {" ".join(flags)}\n')
    last.chmod(0o700)
    environment = os.environ | {"CXX": str(last), "XDG_CACHE_HOME": str(tmp_path)}
    if "-g" in flags:
        names = [
            subprocess.run(
                [compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True
            ).stdout.strip()
            for name in ("asan", "ubsan")
        ]
        environment |= {"LD_PRELOAD": " ".join(names), "ASAN_OPTIONS": "detect_leaks=0"}
    atol = 6e-5 if "-march=x86-64-v2" in flags else 3e-5  # without FMA, fox's bias is off by 4e-5
    command = [sys.executable, "-c", PROGRAM.format(atol=atol)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "all cases ran" in done.stdout, done.stderr[-3000:]
    assert "runtime error" not in done.stderr
