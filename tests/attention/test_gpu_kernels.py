"""The kernels for GPUs say what full attention says, in Triton's interpreter; and they compile for an H200."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.attention.native import gpu_attention
from cope_jax.attention.native.gpu_attention import Sizes
from tests.attention.problems import DOCUMENTS, SHUFFLED, assert_equals_full
from tests.oracle.encodings import Sizes as Shapes

pytest.importorskip("triton", reason="needs the extra gpu-kernels")
torch = pytest.importorskip("torch", reason="Triton's interpreter needs torch")

from cope_jax.attention.native import gpu_kernels  # noqa: E402

H200 = "NVIDIA H200"
SHAPES = Shapes(heads=4, kv_heads=2, head_dim=16, model_dim=6, max_length=80)
BLOCKS = Sizes(32, 16, 32, 4, 1)  # so small that a short sequence has many


def interpret(launch, *arrays):
    """Runs a kernel in Triton's interpreter; see the variable TRITON_INTERPRET in tests/conftest.py."""
    launch = dataclasses.replace(launch, sizes=BLOCKS)
    kernel = getattr(gpu_kernels, launch.kernel)

    def run(*arrays):
        outputs = [torch.zeros(x.shape, dtype=TORCH[jnp.dtype(x.dtype).name]) for x in launch.results]
        with np.errstate(over="ignore"):  # of the interpreter's sigmoid
            kernel[(launch.programs,)](*map(to_torch, arrays), *outputs, **launch.metaparameters)
        return [to_numpy(x) for x in outputs]

    return jax.pure_callback(run, list(launch.results), *arrays)


TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}


def to_torch(x):
    x = np.array(x)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(x)


def to_numpy(x):
    return x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


attention = functools.partial(gpu_attention.attention, device=H200, run=interpret)
compare = functools.partial(assert_equals_full, attention, sizes=SHAPES)


@pytest.mark.parametrize(
    ("spec", "length", "keys", "options"),
    [
        ("rope", 70, 80, {}),
        ("cope(npos_max=6)", 70, 80, {}),
        ("learned+cope(npos_max=80)", 40, 40, {}),
        ("cope(npos_max=20,gate=value)+rope", 40, 40, {}),
        ("cope(npos_max=6,gate=separate_key)", 40, 70, {"window": 20}),
        ("cope(position=slope)", 40, 40, {"causal": False}),
        ("cope(position=learned_slope,gate=separate_key)", 40, 40, {}),
        ("cope(npos_max=6)", 80, 40, {"segments": None}),  # more queries than keys
        ("cope(npos_max=6)", 70, 70, {"window": 20, "segments": DOCUMENTS}),
        ("cope(npos_max=6)", 70, 70, {"segments": SHUFFLED, "causal": False}),
        ("none", 70, 80, {"window": 40, "causal": False}),
        ("none", 70, 70, {"window": 33}),
    ],
    ids=str,
)
def test_it_equals_full_attention(spec, length, keys, options):
    compare(spec, length, keys, **options)
