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

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from cope_jax import encodings
from cope_jax.attention import Reason, attend, full_attention, fused, prepare
from cope_jax.attention.attend import automatic
from cope_jax.attention.kernels.gpu import gpu_attention
from cope_jax.attention.kernels.gpu.gpu_attention import Sizes
from cope_jax.errors import ConfigError
from tests.attention.problems import DOCUMENTS, SHUFFLED, assert_equals_full, ran
from tests.oracle.encodings import Sizes as Shapes

triton = pytest.importorskip("triton", reason="needs the extra gpu-kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    torch = pytest.importorskip("torch", reason="Triton's interpreter needs torch")

from cope_jax.attention.kernels.gpu import gpu_kernels  # noqa: E402 - imports triton, which may be missing

H200 = "NVIDIA H200"
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
    "jax_plugins.xla_cuda13"
)
SHAPES = Shapes(heads=2, kv_heads=1, head_dim=16, model_dim=6, max_length=80)
BLOCKS = Sizes(32, 16, 32, 4, 1)  # so small that a short sequence has many


def interpret(launch, *arrays):
    """Runs a kernel in Triton's interpreter."""
    launch = dataclasses.replace(launch, sizes=BLOCKS)
    kernel = getattr(gpu_kernels, launch.kernel)

    def run(*arrays):
        # The interpreter multiplies the bits of bfloat16 as integers, so the kernels get float32.
        given = [
            torch.from_numpy(np.array(x, np.int32 if x.dtype == np.int32 else np.float32))
            for x in arrays
        ]
        outputs = [torch.full(x.shape, torch.nan) for x in launch.results]
        for n in launch.zeroed:
            outputs[n].zero_()
        with np.errstate(over="ignore"):  # of the interpreter's sigmoid
            kernel[(launch.programs,)](*given, *outputs, **launch.metaparameters)
        return [
            x.numpy().astype(result.dtype)
            for x, result in zip(outputs, launch.results, strict=True)
        ]

    return jax.pure_callback(run, list(launch.results), *arrays)


# On a GPU, with JAX_PLATFORMS=cuda, the kernels themselves run: see tests/conftest.py.
RUN = interpret if os.environ.get("TRITON_INTERPRET") == "1" else None


def attention(encoding, request):
    return ran(gpu_attention.plan(encoding, request, device=H200 if RUN else None, run=RUN))


def compare(spec, length, keys, sizes=SHAPES, **options):
    assert_equals_full(attention, spec, length, keys, sizes=sizes, **options)


@pytest.mark.parametrize(
    ("spec", "length", "keys", "options"),
    [
        ("cope(npos_max=6)", 50, 70, {}),
        ("cope(npos_max=20)", 40, 40, {"no_keys": True}),  # half of the positions are whole
        ("cope(npos_max=6,gate=separate_key)", 40, 70, {"window": 20}),
        ("cope(position=learned_slope,gate=value)+rope", 40, 40, {}),
        ("cope(npos_max=6)", 70, 70, {"segments": SHUFFLED, "causal": False}),
        ("none", 64, 80, {"window": 60, "causal": False}),
        ("none", 40, 40, {"window": 2**31 - 1}),  # hides nothing
        (
            "rope",
            64,
            70,
            {"segments": DOCUMENTS, "causal": False, "sizes": Shapes(4, 2, 16, 6, 80)},
        ),
    ],
    ids=str,
)
def test_it_equals_full_attention(spec, length, keys, options):
    compare(spec, length, keys, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "length", "keys", "options"),
    [
        ("rope", 70, 80, {}),
        ("learned+cope(npos_max=80)", 40, 40, {}),  # nothing is saturated
        ("cope(npos_max=2)", 40, 40, {}),  # all but the nearest keys are
        ("cope(npos_max=20,gate=value,scale_position_logits=True)", 40, 40, {}),
        ("cope(position=slope)", 40, 40, {"causal": False}),
        ("cope(npos_max=6)", 80, 40, {}),  # more queries than keys
        ("cope(npos_max=6)", 70, 70, {"window": 20, "segments": DOCUMENTS}),
        ("cope(npos_max=6)", 64, 64, {}),  # whole blocks
        ("none", 70, 70, {"window": 33}),
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


@pytest.mark.slow
def test_types_vmap_remat_nan_and_a_query_that_sees_no_key():
    encoding = encodings.create("cope", num_heads=2, head_dim=16, npos_max=4, rngs=nnx.Rngs(0))
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
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return [(record["kind"], record["forward"], record["backward"]) for record in results]


def test_on_an_h200_bfloat16_heads_of_64_keep_their_numbers_in_registers():
    ((kind, forward, backward),) = compiled(("cope", 64, "bfloat16", H200))
    for kernel in (forward, backward):
        assert kernel["registers"] > 100
        assert kernel["stack"] <= 16  # bytes, of which spilled registers are a part
        assert kernel["shared"] <= SHARED[kind] * 1024


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
    for case, (kind, forward, backward) in zip(cases, compiled(*cases), strict=True):
        for kernel in (forward, backward):
            assert kernel["shared"] <= SHARED[kind] * 1024, (case, kernel)


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
    assert int(done.stdout) < 9 * 2**30  # recorded in docs/attention.md: 7.6 GiB


def on(kind):
    device = jax._src.mesh.AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))


def test_attend_takes_it_on_request_and_says_why_it_cannot():
    def reason(spec, kind=H200, dtype=jnp.float32, width=16, **options):
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

    assert reason("cope(npos_max=8)") is None
    assert "cannot express what this encoding adds" in reason("alibi")
    assert "were not compiled for the device 'NVIDIA GeForce" in reason(
        "cope", "NVIDIA GeForce RTX 4090"
    )
    assert "were not compiled for the device 'NVIDIA RTX A1000'" in reason(
        "cope", "NVIDIA RTX A1000"
    )
    for width in (8, 512):
        assert f"widths of a head, ({width}, {width}), are not between 16 and 256" in reason(
            "cope", width=width
        )
    assert "not float32 or bfloat16" in reason("cope", dtype=jnp.float16)
    assert "no dropout" in reason("cope", dropout_rate=0.1, dropout_key=jax.random.key(0))
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
