"""Compiles the fused attention kernels alone, and counts their cycles from bundles and iterations
of loops.

The compiler states no cycles for a kernel within a training step.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax.attention import attend
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.encodings import AttentionShape, Encoding, EncodingConfig
from cope_jax.models.decoder import DecoderConfig
from tools.compile_check import bundles
from tools.compile_check.trip_counts import carry_of, loop_turns

KERNELS = {"forward": "attention", "backward": "attention_gradient"}
"""The names of the kernels in compiled programs."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Causal attention of one example, without segments and window."""

    encoding: str
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    blocks: tuple[int, ...] | None = None

    def build(self) -> Encoding:
        """The encoding."""
        width = self.heads * self.head_dim
        shape = AttentionShape(self.heads, self.head_dim, self.kv_heads, width, self.length)
        return EncodingConfig.parse(self.encoding).build(shape, rngs=nnx.Rngs(0))

    def step(
        self, attention: Callable[..., Any], sharding: Any = None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function that computes `attention(encoding, x, q, k, v)` with its gradients; and its
        arguments.
        """
        graph, params = nnx.split(self.build())

        def blank(*shape: int, dtype: Any = self.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        def step(params: Any, x: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
            def run(params: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
                return attention(nnx.merge(graph, params), x, q, k, v)

            out, pull = jax.vjp(run, params, x, q, k, v)
            return out, pull(dout)

        q = blank(1, self.length, self.heads, self.head_dim)
        k = blank(1, self.length, self.kv_heads, self.head_dim)
        weights = jax.tree.map(lambda x: blank(*x.shape, dtype=x.dtype), params)
        return step, (weights, blank(1, self.length, self.heads * self.head_dim), q, k, k, q)


def of_model(model: DecoderConfig, length: int, topology: str) -> dict[str, float]:
    """The cycles of one head by the name of the kernel, for the attention of a model; compiled in
    another process.

    libtpu dumps bundles for all programs of a process, and those of a training step would take too
    much space.
    """
    block = model.block
    shape = block.attention_shape(model.max_length)
    flags = {"topology": topology, "encodings": model.encoding.text(), "lengths": length}
    flags |= {"heads": shape.num_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    flags["dtype"] = block.compute_dtype
    if block.attention_blocks is not None:
        flags["blocks"] = ",".join(map(str, block.attention_blocks))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "tools.kernels", f"--json={path}"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (cycles_of,) = json.loads(path.read_text())
    return {KERNELS[name]: cycles_of[name]["cycles"] for name in KERNELS}


def count(problem: Problem, device: Any, folder: Path) -> dict[str, Any]:
    """The bundles, iterations and cycles of the forward and backward kernels, for one head.

    `folder` is where libtpu dumps, see `bundles.dump_into`.
    """
    mesh = Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))

    def attention(encoding: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
        options: Any = {"embedded": True, "blocks": problem.blocks}
        return attend(q, k, v, encoding=encoding, x=x, implementation="fused", **options)

    step, arguments = problem.step(attention, NamedSharding(mesh, PartitionSpec()))
    encoding = problem.build()
    carry = carry_of(encoding)
    with jax.set_mesh(mesh):
        jax.jit(step).lower(*arguments).compile()
        lengths = problem.length, problem.length
        sizes = tpu_attention.sizes_of(encoding, carry, *lengths, problem.blocks)
    # Each head's loops end by themselves.
    one_head = dataclasses.replace(problem, heads=1, kv_heads=1).build()
    turns = loop_turns(one_head, problem.length, sizes)
    strips = -(-problem.length // sizes.queries)
    counts: dict[str, Any] = {**dataclasses.asdict(problem), "blocks": tuple(sizes), "turns": turns}
    for name, text in KERNELS.items():
        kernel = bundles.read(folder, text)
        # Before them, results are cleared, once for all blocks of queries.
        loops = kernel.loops[-len(turns) :]
        cycles = kernel.straight + sum(n * loop for n, loop in zip(turns, loops, strict=True))
        counts[name] = {"straight": kernel.straight, "loops": loops, "cycles": strips * cycles}
    return counts
