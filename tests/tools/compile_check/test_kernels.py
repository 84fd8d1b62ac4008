"""Counts of cycles of the fused kernels; with libtpu, they compile for every chip."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import BlockSizes
from tools.compile_check import bundles, costs
from tools.compile_check.hlo import Module
from tools.compile_check.trip_counts import loop_turns, walk

# A kernel of 14 bundles: the grid's loop at depth 1, in it one loop of 3 bundles and one of 2.
DUMP = """
     0x0   : { s0 = 1 }
     0x1 LB: > { s1 = 1 }
     0x2   : > { s1 = 1 }
     0x3 LB: >> { v1 = vadd v0 }
     0x4   : >> { v1 = vadd v0 ;; v2 = vmul v0 }
     0x5 LE: >> { v1 = vadd v0 }
     0x6   : > { s1 = 1 }
     0x7 LB: >> { v1 = vadd v0 }
     0x8   : >> { v1 = vadd v0 }
     0x9   : > { s1 = 1 }
     0xa PF: > { s1 = 1 }
not a bundle
"""


def test_bundles_are_counted_by_loop():
    assert bundles.parse(DUMP) == bundles.Kernel(straight=6, loops=(3, 2))


def test_the_newest_kernel_of_a_name_is_read(tmp_path):
    for age, name in enumerate(["attention.1", "jvp_attention_.1", "attention_gradient.2"]):
        for kind in ("72-final_bundles", "71-schedule-analysis_final_bundles"):
            path = tmp_path / f"123-{name}-{kind}.txt"
            path.write_text(DUMP + "     0xb   : { s0 = 1 }\n" * age)
            os.utime(path, (age, age))
    assert [
        bundles.read(tmp_path, name).straight for name in ("attention", "attention_gradient")
    ] == [7, 8]


@pytest.mark.parametrize(
    ("spec", "sizes", "turns"),
    [
        ("rope", BlockSizes(64, 64, 64), [1, 3.5]),  # 1 to 8 blocks of keys
        ("rope", BlockSizes(64, 128, 128), [1, 1.5]),
        # About half of the gates are open.
        pytest.param(
            *("cope(npos_max=400)", BlockSizes(64, 64, 128), [1, 3.5, 0, 0]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("cope(npos_max=2)", BlockSizes(64, 64, 128), [1, 0.875, None, None]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_turns_of_loops(spec, sizes, turns):
    encoding = encodings.create(spec, num_heads=2, head_dim=8, max_length=512, rngs=nnx.Rngs(0))
    counted = loop_turns(encoding, 512, sizes)
    assert len(counted) == len(turns)
    if turns[-1] is None:  # 0 to 6.5 blocks are left, in whole pairs and what remains of them
        assert counted[:2] == turns[:2]
        assert 2 * counted[2] + counted[3] == pytest.approx(4.5 - sum(turns[:2]))
    else:
        np.testing.assert_allclose(counted, turns)


def test_heads_of_kernels_are_counted_in_all_iterations():
    call = 'custom-call(p), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/NAME/pallas_call"}'
    text = f"""
ENTRY %main (p: f32[2,4,8,1,64]) -> f32[2,4,8,1,64] {{
  %p = f32[2,4,8,1,64] parameter(0)
  %attention.1 = (f32[2,4,8,1,64], f32[2,4,8,64,64]) {call.replace("NAME", "attention")}
  ROOT %attention_gradient.1 = f32[2,4,8,1,64] {call.replace("NAME", "attention_gradient")}
}}
"""
    visits = list(walk(Module.parse(text), lambda name: None))
    assert costs.kernel_heads(visits) == {"attention": 8, "attention_gradient": 8}


LIBTPU = importlib.metadata.version("libtpu") if importlib.util.find_spec("libtpu") else None


def count(topology, *flags):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tools.kernels", f"--topology={topology}", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: extra tpu-compile"
)
@pytest.mark.parametrize(
    ("topology", "spec", "dtype"),
    [
        pytest.param("v5e:2x2", "cope", "bfloat16", marks=pytest.mark.newest),
        *(
            pytest.param(topology, spec, dtype, marks=pytest.mark.slow)
            for topology, spec, dtype in [
                ("v4:2x2x1", "fox", "bfloat16"),
                ("v5p:2x2x1", "cope(gate=value)+rope", "bfloat16"),
                ("v6e:2x2", "relative", "bfloat16"),
                ("tpu7x:2x2x1", "cope(npos_max=1000)", "float32"),
                ("v5e:2x2", "fire", "bfloat16"),
            ]
        ),
    ],
)
def test_kernels_compile(topology, spec, dtype, tmp_path):
    sizes = ["--lengths=512", "--heads=2", "--kv_heads=1", "--head_dim=64", f"--dtype={dtype}"]
    done = count(topology, f"--encodings={spec}", *sizes, f"--json={tmp_path}/x.json")
    assert done.returncode == 0, done.stderr
    (content,) = json.loads((tmp_path / "x.json").read_text())
    for kernel in (content["forward"], content["backward"]):
        assert len(kernel["loops"]) == len(content["turns"]) and min(kernel["loops"]) > 0
        assert kernel["cycles"] > kernel["straight"] > 0


RECORDED = {"cope": (58_252, 105_296), "rope": (18_066, 27_896)}
"""Cycles of the kernels forward and backward with libtpu 0.0.42.1."""


@pytest.mark.slow
@pytest.mark.skipif(LIBTPU != "0.0.42.1", reason="the cycles were recorded with libtpu 0.0.42.1")
def test_cycles_are_as_recorded(tmp_path):
    done = count("v5e:2x2", "--encodings=cope,rope", "--lengths=2048", f"--json={tmp_path}/x.json")
    assert done.returncode == 0, done.stderr
    for counted in json.loads((tmp_path / "x.json").read_text()):
        cycles = [counted[kernel]["cycles"] for kernel in ("forward", "backward")]
        np.testing.assert_allclose(cycles, RECORDED[counted["encoding"]], rtol=0.1)


COMPILE = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from cope_jax import encodings
from cope_jax.attention import attend
from tools.compile_check import chips
from flax import nnx
devices = np.array(chips.describe("v5e:2x2").devices)
encoding = encodings.create("cope", num_heads=2, head_dim=128, rngs=nnx.Rngs(0))

def compiled(devices, shape, spec, segments, **options):
    mesh = Mesh(devices, ("sequence",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
    ids = jax.ShapeDtypeStruct(shape[:2], "int32", sharding=NamedSharding(mesh, spec))
    def step(q, k, v, ids, dout):
        own = {"q_segment_ids": ids, "k_segment_ids": ids} if segments else {}
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, encoding=encoding, **own, **options), q, k, v)
        return out, pull(dout)
    with jax.set_mesh(mesh):
        return jax.jit(step).lower(x, x, x, ids, x).compile().as_text().count("tpu_custom_call")

print(compiled(devices, (1, 4096, 2, 128), PartitionSpec(None, "sequence"), False, sequence_axis="sequence"))
print(compiled(devices[:1], (64, 8192, 2, 128), PartitionSpec(), True, implementation="fused"))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: extra tpu-compile"
)
def test_kernels_compile_in_a_ring_and_for_many_packed_documents():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert min(map(int, done.stdout.split())) >= 2  # forward and backward
