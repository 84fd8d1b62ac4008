"""The kernels for GPUs say what full attention says, in Triton's interpreter; and they compile for
an H200.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from cope_jax import encodings
from cope_jax.attention import Plan, Reason, attend, full_attention, fused, prepare
from cope_jax.attention.attend import automatic
from cope_jax.attention.kernels.gpu import gpu_attention, triton_programs
from cope_jax.attention.kernels.gpu.gpu_attention import Sizes
from cope_jax.errors import ConfigError
from tests.attention.problems import DOCUMENTS, SHUFFLED, assert_equals_full, ran
from tests.attention.test_fused import reason
from tests.encodings.cases import CASES, every
from tests.oracle.encodings import Sizes as Shapes

triton = pytest.importorskip("triton", reason="needs the extra gpu-kernels")
import triton.language as tl  # noqa: E402

from cope_jax.attention.kernels.gpu import triton_operations as operations  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    torch = pytest.importorskip("torch", reason="Triton's interpreter needs torch")

H200 = "NVIDIA H200"
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
    "jax_plugins.xla_cuda13"
)
SHAPES = Shapes(heads=2, kv_heads=1, head_dim=16, model_dim=6, max_length=80)
BLOCKS = Sizes(32, 16, 4, 1)  # so small that a short sequence has many


def interpret(launch, *arrays):
    """Runs a kernel in Triton's interpreter."""
    # The interpreter multiplies the bits of bfloat16 as integers, so the kernels get float32.
    launch = dataclasses.replace(launch, text=launch.text.replace("tl.bfloat16", "tl.float32"))

    def run(*arrays):
        given = [
            torch.from_numpy(np.array(x, np.int32 if x.dtype == np.int32 else np.float32))
            for x in arrays
        ]
        # What is not written is NaN, or a block of keys that no array has.
        outputs = [
            torch.full(x.shape, -999 if x.dtype == np.int32 else torch.nan).to(
                torch.int32 if x.dtype == np.int32 else torch.float32
            )
            for x in launch.results
        ]
        for n in launch.zeroed:
            outputs[n].zero_()
        # Of exponentials, of rows of NaN, and of what lies beyond the size of a tile.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            launch.function[(launch.programs,)](*given, *outputs)
        return [
            x.numpy().astype(result.dtype)
            for x, result in zip(outputs, launch.results, strict=True)
        ]

    return jax.pure_callback(run, list(launch.results), *arrays)


# On a GPU, with JAX_PLATFORMS=cuda, the kernels themselves run: see tests/conftest.py.
RUN = interpret if os.environ.get("TRITON_INTERPRET") == "1" else None


def planned(encoding, request):
    device, sizes = (H200, BLOCKS) if RUN else (None, None)
    return gpu_attention.plan(encoding, request, device=device, launch=RUN, sizes=sizes)


def attention(encoding, request):
    return ran(planned(encoding, request))


def compare(spec, length, keys, sizes=SHAPES, **options):
    assert_equals_full(attention, spec, length, keys, sizes=sizes, **options)


@triton.jit
def operate(x, index, z, words, out, collected, memory, SIZE: tl.constexpr, HATS: tl.constexpr):
    """Every operation on tiles of `ROWS` rows; kernels of few encodings use them."""
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    at = rows * 8 + columns
    number, cell = tl.load(x + at), tl.load(index + at)
    tl.store(out + at, operations.log1p(number))
    tl.store(out + 32 + at, operations.tanh(number))
    tl.store(out + 64 + at, operations.sign(number))
    tl.store(out + 96 + at, operations.take(z + rows * 2 * SIZE, cell.to(tl.int32), 2, SIZE))
    row = tl.load(z + 2 * (rows * SIZE + columns), mask=columns < SIZE, other=0.0)
    tl.store(out + 128 + at, operations.take_from(row, cell.to(tl.int32), SIZE))
    tl.store(collected + at, operations.collect(cell, number, SIZE, HATS, 8))
    operations.collect_to(memory + rows * 8, cell, number, SIZE, HATS)
    key = tl.full([1, 1], 7, tl.uint32)
    first, second = operations.threefry(key, key + 1, at.to(tl.uint32), at.to(tl.uint32) + 32)
    tl.store(words + at, first)
    tl.store(words + 32 + at, second)


@pytest.mark.skipif(RUN is None, reason="the interpreter calls it")
@pytest.mark.parametrize("hats", [False, True])
def test_operations(hats):
    rng, size = np.random.default_rng(0), 6
    x = rng.normal(size=(4, 8)).astype(np.float32)
    x[0, :3] = 0.0, 1e-9, -0.25
    positions = rng.uniform(-0.9, size + 0.9, (4, 8)).astype(np.float32)  # some outside
    index = positions.clip(0) if hats else np.floor(positions)
    z = rng.normal(size=(4, 2 * size)).astype(np.float32)  # of which every second is read
    out, words = torch.zeros(5, 4, 8), torch.zeros(2, 4, 8, dtype=torch.uint32)
    collected, memory = torch.zeros(4, 8), torch.ones(4, 8)
    given = [torch.from_numpy(array) for array in (x.clip(-0.9), index.astype(np.float32), z)]
    with np.errstate(all="ignore"):
        operate[(1,)](*given, words, out, collected, memory, size, hats)
    clipped = np.clip(index.astype(np.int32), 0, size - 1)
    taken, x = np.take_along_axis(z[:, ::2], clipped, 1), x.clip(-0.9)
    expected = [np.log1p(x), np.tanh(x), np.sign(x), taken, taken]
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(out[0].numpy(), expected[0], rtol=2e-6, atol=0)  # small x too
    sums = np.zeros((4, 8))
    for row, column in np.ndindex(4, 8):
        cell = clipped[row, column]
        share = index[row, column] - cell if hats and cell < size - 1 else 0
        sums[row, cell] += (1 - share) * x[row, column]
        sums[row, cell + 1] += share * x[row, column]
    np.testing.assert_allclose(collected.numpy(), sums, atol=1e-6)
    np.testing.assert_allclose(memory.numpy(), 1 + sums, atol=1e-6)
    counts = np.arange(64, dtype=np.uint32)
    bits = jax.extend.random.threefry_2x32(jnp.array([7, 8], jnp.uint32), counts)
    np.testing.assert_array_equal(words.numpy().ravel(), bits)


class Operations(encodings.Encoding):
    """A score of operations that the encodings above do without."""

    def __init__(self, config, shape, *, rngs):
        super().__init__(config, shape, rngs=rngs)
        self.weights = nnx.Param(jnp.array([1.0, 0.5]), axes=("heads",))

    def score(self, pairs, carry):
        s = pairs.logits
        x = jnp.abs(s) + 0.1
        column = jax.lax.broadcasted_iota(jnp.int32, s.shape, 3)
        odd = (s <= -0.5) | ~((s >= 0.5) & (column >= 0))
        s = jnp.where(jnp.isfinite(1 / jnp.where(s > 1, 0.0, x)), s, -s)
        s = jnp.where(odd, jnp.cos(s) + jax.lax.erf(s), jnp.sin(s) / x)
        more = jnp.log(x) + jnp.log1p(x) + jax.lax.rsqrt(x) + jnp.sqrt(x)
        more += jnp.tanh(s)
        weights = self.weights[None, :, None, None]
        return s + weights * more + jnp.sign(s) * jnp.floor(x) + x**3, carry


def test_operations_that_few_encodings_have():
    shape = encodings.AttentionShape(2, 16, 2)
    graph, params = nnx.split(Operations(Operations.Config(), shape, rngs=nnx.Rngs(0)))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 20, 2, 16))

    def gradients(attention):
        def out(params, q, k, v):
            encoding = nnx.merge(graph, params)
            return attention(encoding, prepare(q, k, v, encoding=encoding))

        value, pull = jax.vjp(jax.jit(out), params, q, k, v)
        return jax.tree.leaves((value, pull(jnp.cos(value))))

    for computed, exact in zip(gradients(attention), gradients(full_attention), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "length", "keys", "options"),
    [
        ("cope(npos_max=6)", 20, 40, {"window": 20}),
        ("stick_breaking", 40, 40, {}),  # rows that are done
        pytest.param("t5", 30, 30, {}, marks=pytest.mark.slow),
        pytest.param(
            "none",
            40,
            40,
            {"segments": DOCUMENTS, "causal": False, "scale": 0.3},
            marks=pytest.mark.slow,
        ),
        # Positions that are real numbers.
        pytest.param("alibi", 40, 40, {"step": 0.7}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_equals_full_attention(spec, length, keys, options):
    compare(spec, length, keys, **options)


# Without those for heads of width 4.
ALL = [spec for spec in CASES if "longrope" not in spec and "max_length=14" not in spec]


@pytest.mark.slow
@every(ALL)
def test_every_encoding(spec):
    why = reason(spec)
    if why is not None:
        with pytest.raises(AssertionError, match=why):  # it has no plan
            compare(spec, 40, 40, sizes=Shapes(4, 2, 16, 8, 80))
        return
    # The gradient of FIRE's last bias is 0: a sum of numbers up to 1 that cancel.
    least = 1.0 if "fire" in spec else 1e-3
    compare(spec, 40, 40, sizes=Shapes(4, 2, 16, 8, 80), atol=6e-5, least=least)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "length", "keys", "options"),
    [
        ("cope(npos_max=6)", 50, 70, {}),
        ("cope(npos_max=20)", 40, 40, {"no_keys": True}),  # half of the positions are whole
        ("t5", 40, 40, {"sizes": Shapes(4, 2, 16, 6, 80)}),
        ("cope(npos_max=6,gate=separate_key)", 40, 70, {"window": 20}),
        ("cope(position=learned_slope,gate=value)+rope", 40, 40, {}),
        ("cope(npos_max=6)", 70, 70, {"segments": SHUFFLED, "causal": False}),
        ("learned+cope(npos_max=80)", 40, 40, {}),  # nothing is saturated
        ("cope(npos_max=2)", 40, 40, {}),  # all but the nearest keys are
        ("cope(position=slope)", 40, 40, {"causal": False}),
        ("cope(npos_max=6)", 80, 40, {}),  # more queries than keys
        ("cope(npos_max=6)", 70, 70, {"window": 20, "segments": DOCUMENTS}),
        ("cope(npos_max=6)", 64, 64, {}),  # whole blocks
        ("cope(npos_max=2048)", 40, 40, {}),  # rows that do not fit in registers
        ("kerple", 40, 70, {"logits_soft_cap": 2.0}),
        ("none", 64, 80, {"window": 60, "causal": False}),
        ("none", 40, 40, {"window": 2**31 - 1}),  # hides nothing
        ("none", 1, 70, {}),
    ],
    ids=str,
)
def test_it_equals_full_attention_in_more_cases(spec, length, keys, options):
    compare(spec, length, keys, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes", [Shapes(2, 2, 80, 6, 80), Shapes(4, 1, 128, 6, 80), Shapes(1, 1, 24, 6, 80)], ids=str
)
def test_widths_and_groups_of_heads(shapes):
    compare("cope(npos_max=20)", 40, 40, sizes=shapes)


def test_a_program_has_several_blocks_of_keys(monkeypatch):
    monkeypatch.setattr(triton_programs, "PROGRAMS", 4)  # two chunks of two blocks for each head
    encoding = encodings.create("fox", num_heads=2, head_dim=16, model_dim=8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 60, 8))
    q = jax.random.normal(jax.random.key(1), (1, 60, 2, 16))

    def gradient(attention):
        def out(q):
            return (attention(encoding, prepare(q, q, q, encoding=encoding, x=x)) ** 2).sum()

        return jax.jit(jax.grad(out))(q)

    np.testing.assert_allclose(gradient(attention), gradient(full_attention), rtol=0, atol=1e-4)


def test_dropout():
    """Every pair is dropped that full attention drops."""
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 16))

    def gradients(attention):
        def out(q, k, v):
            options = {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)}
            return attention(encoding, prepare(q, k, v, encoding=encoding, **options))

        value, pull = jax.vjp(jax.jit(out), q, k, v)
        return value, *pull(jnp.cos(value))

    for computed, exact in zip(gradients(attention), gradients(full_attention), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["query_key", "value"])
def test_types_vmap_remat_nan_and_a_query_that_sees_no_key(gate):
    spec = f"cope(npos_max=4,gate={gate})"
    encoding = encodings.create(spec, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    q, k, v, dout = jnp.bfloat16(jax.random.normal(jax.random.key(0), (4, 2, 1, 20, 2, 16)))
    k = k.at[0, 0, 15].set(jnp.nan)
    ids = jnp.zeros((1, 20), jnp.int32)

    def out(run, q, k, v):
        inputs = prepare(
            q, k, v, encoding=encoding, q_segment_ids=ids.at[0, 3].set(9), k_segment_ids=ids
        )
        return run(encoding, inputs)

    def both(run, q, k, v, dout):
        value, pull = jax.vjp(jax.checkpoint(functools.partial(out, run)), q, k, v)
        return value, *pull(dout.astype(value.dtype))

    computed = jax.jit(jax.vmap(functools.partial(both, attention)))(q, k, v, dout)
    wide = (x.astype(jnp.float32) for x in (q, k, v, dout))
    exact = jax.vmap(functools.partial(both, full_attention))(*wide)
    for array, other in zip(computed, exact, strict=True):
        assert array.dtype == jnp.bfloat16
        # NaN where the other has NaN.
        np.testing.assert_allclose(array.astype(jnp.float32), other, rtol=0, atol=5e-2)
    assert (
        not computed[0][0, 0, 3].any()
        and np.isnan(computed[0][0, 0, 15:]).all()
        and not np.isnan(computed[0][0, 0, :15]).any()
    )


def test_a_gate_with_a_key_of_its_own_runs_in_bfloat16():
    """Its gradient multiplies float32 with bfloat16."""
    encoding = encodings.create("cope(gate=value)", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 40, 2, 16), jnp.bfloat16)
    plan = gpu_attention.plan(encoding, prepare(x, x, x, encoding=encoding), device=H200)
    assert isinstance(plan, Plan), plan


def test_products_of_float32_are_exact_where_jax_says_so():
    texts = []

    def record(launch, *arrays):
        texts.append(launch.text)
        return [jnp.zeros(x.shape, x.dtype) for x in launch.results]

    encoding = encodings.create("none", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 40, 2, 16))
    request = prepare(x, x, x, encoding=encoding)
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            plan = gpu_attention.plan(encoding, request, device=H200, launch=record)
            jax.eval_shape(lambda plan=plan: ran(plan))
    assert "precision='ieee'" in texts[0] and "precision='tf32x3'" in texts[-1]
    assert "tf32x3" not in texts[0]


COMPILE = """
import json, sys
from tools.compile_check.gpu_resources import count
from tools.compile_check.kernel_cycles import Problem
for encoding, width, dtype, kind in json.loads(sys.argv[1]):
    print(json.dumps(count(Problem(encoding, 4096, 8, 2, width, dtype), kind)))
"""
SHARED = {"NVIDIA A100": 163, "NVIDIA H200": 227, "NVIDIA B200": 227}  # KiB that a program may have


def compiled(*problems):
    command = [sys.executable, "-c", COMPILE, json.dumps(problems)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_on_an_h200_bfloat16_heads_of_64_keep_their_numbers_in_registers():
    (record,) = compiled(("rope", 64, "bfloat16", H200))
    assert len(record["kernels"]) == 3
    for kernel in record["kernels"].values():
        assert kernel["registers"] > 50
        assert kernel["stack"] <= 16  # bytes, of which spilled registers are a part
        assert kernel["shared"] <= SHARED[record["kind"]] * 1024


@pytest.mark.slow
def test_they_compile_for_every_kind_of_gpu_type_and_width():
    cases = [
        (encoding, width, dtype, kind)
        for kind in SHARED
        for encoding in ("rope", "cope", "cope(gate=value,position=slope)")
        for width in (64, 128, 256)
        for dtype in ("bfloat16", "float32")
        if kind == H200 or encoding == "cope"
    ]
    for case, record in zip(cases, compiled(*cases), strict=True):
        for kernel in record["kernels"].values():
            assert kernel["shared"] <= SHARED[record["kind"]] * 1024, (case, kernel)


THROUGH_XLA = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from cope_jax.attention import attend
from tools.compile_check import chips
from tools.compile_check.kernel_cycles import Problem
mesh = Mesh(np.array(chips.describe("h200:1").devices), ("device",), axis_types=(AxisType.Auto,))
def attention(encoding, x, q, k, v):
    return attend(q, k, v, encoding=encoding, x=x, embedded=True, implementation="fused")
step, arguments = Problem("cope", 1_000_000, 8, 8, 64, "bfloat16").step(attention, NamedSharding(mesh, PartitionSpec()))
with jax.set_mesh(mesh):
    program = jax.jit(step).lower(*arguments).compile()
assert program.as_text().count("triton_kernel_call") >= 2
print(program.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not PLUGIN, reason="needs JAX's plugin for CUDA: pip install jax-cuda13-plugin[with-cuda]"
)
def test_a_million_tokens_compile_for_an_h200_through_jax_triton():
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", THROUGH_XLA], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 12 * 2**30  # recorded in docs/attention.md: 11.5 GiB


def on(kind):
    device = jax._src.mesh.AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))


def test_attend_takes_it_on_request_and_says_why_it_cannot():
    def why(spec, kind=H200, dtype=jnp.float32, width=16, **options):
        encoding = encodings.create(
            spec, num_heads=2, head_dim=width, model_dim=32, rngs=nnx.Rngs(0)
        )
        x = jnp.ones((1, 70, 2, width), dtype)
        with on(kind):
            # Until the kernels have been measured on a GPU.
            assert automatic(70, 70) == ("blockwise", "full")
            answer = fused.plan(
                encoding, prepare(x, x, x, encoding=encoding, embedded=True, **options)
            )
            return answer.why if isinstance(answer, Reason) else None

    assert why("cope(npos_max=8)") is None
    assert why("alibi") is None
    assert why("cope", dropout_rate=0.1, dropout_key=jax.random.key(0)) is None
    assert "needs all keys in one block" in why("cope_two_sided")
    assert "a table of 32 × 255 numbers does not fit" in why("relative(max_distance=255)")
    assert "were not compiled for the device 'NVIDIA GeForce" in why(
        "cope", "NVIDIA GeForce RTX 4090"
    )
    assert "were not compiled for the device 'NVIDIA RTX A1000'" in why("cope", "NVIDIA RTX A1000")
    for width in (8, 512):
        assert f"widths of a head, ({width}, {width}), are not between 16 and 256" in why(
            "cope", width=width
        )
    assert "not float32 or bfloat16" in why("cope", dtype=jnp.float16)
    x = jnp.ones((1, 70, 2, 16))
    with on(H200), pytest.raises(ConfigError, match="have their own"):
        encoding = encodings.create("cope", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
        attend(x, x, x, encoding=encoding, implementation="fused", blocks=(64, 64, 64))


def test_without_jax_triton_it_says_how_to_install_it(monkeypatch):
    encoding = encodings.create("rope", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 70, 2, 16))
    monkeypatch.setattr(gpu_attention.importlib.util, "find_spec", lambda name: None)
    answer = gpu_attention.plan(encoding, prepare(x, x, x, encoding=encoding), device=H200)
    assert "pip install 'cope-jax[gpu-kernels]'" in answer.why
