"""Attention on NVIDIA GPUs by kernels in Triton that are generated from an encoding's own hooks.

They are called through jax-triton, because Pallas' own Triton backend is deprecated since JAX 0.11,
Mosaic GPU has neither gathers nor running sums, and CUDA C++ would need nvcc on every machine.
Triton brings its own compiler, and an interpreter that runs the same source on a CPU.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.attention import placement
from cope_jax.attention.blocks import BlockSizes, head_major
from cope_jax.attention.kernels.gpu.triton_kernel import GpuExecution, Launch
from cope_jax.attention.kernels.tile import tile_attention
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.attention.stream import Stream, carry_of
from cope_jax.encodings import Encoding

INSTALL = "pip install 'cope-jax[gpu-kernels]'"
NARROWEST, WIDEST = 16, 256  # heads
TYPES = (jnp.float32, jnp.bfloat16)
CAPABILITIES = {"A100": 80, "H100": 90, "H200": 90, "B200": 100}
"""Compute capabilities by a word in the name of a GPU: those whose shared memory holds the blocks
below.
"""


class Sizes(NamedTuple):
    """The numbers of queries and keys of a block, and how Triton compiles a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# By bytes of a number and the width of a head, for encodings with a carry: see docs/attention.md.
# Others have twice as many keys.
SIZES = {
    2: {64: Sizes(64, 16, 4, 2), 128: Sizes(64, 16, 8, 2), 256: Sizes(32, 16, 8, 1)},
    4: {64: Sizes(32, 16, 8, 1), 128: Sizes(32, 16, 8, 1), 256: Sizes(16, 16, 8, 1)},
}
EXACT = (
    "float32",
    "highest",
    "F32_F32_F32",
)  # precisions at which products do not use tensor cores


def plan(
    encoding: Encoding,
    request: Request,
    *,
    device: str | None = None,
    launch: Callable[..., Any] | None = None,
    sizes: Sizes | None = None,
) -> Plan | Reason:
    """Returns the plan to compute the result of `blockwise_attention` in Triton, or why this is not
    possible.

    Sums are float32 whatever the type of the inputs. Results are the same in every run.

    Args:
      encoding: the encoding.
      request: the request.
      device: the kind of GPU; None means the current one.
      launch: what runs a kernel, called as `launch(Launch, *arrays)`; None for jax-triton on the GPU.
      sizes: of blocks; None means those of the type and the width of heads.
    """
    device = device or placement.current_device()
    if capability(device) is None:
        return Reason(f"the Triton kernels were not compiled for the device {device!r}")
    if why := _refusal(encoding, request):
        return Reason(why)
    if launch is None and not all(
        importlib.util.find_spec(name) for name in ("triton", "jax_triton")
    ):
        return Reason(f"jax-triton is not installed ({INSTALL})")
    chosen = sizes or _sizes(encoding, request)
    exact = jax.config.jax_default_matmul_precision in EXACT  # type: ignore[attr-defined]  # made at import

    def prepare() -> Stream:
        blocks = BlockSizes(chosen.queries, chosen.keys, chosen.keys)
        return tile_attention.whole_blocks(encoding, request, blocks)

    stream = jax.eval_shape(prepare)
    execution = GpuExecution(
        keys=stream.keys.k.shape[2],
        precision="ieee" if exact else "tf32x3",
        warps=chosen.warps,
        stages=chosen.stages,
        capability=capability(device),
        launch=launch or run_on_gpu,
    )
    if why := tile_attention.why_untraced(dataclasses.replace(execution, launch=_blank), stream):
        return Reason(why)

    def run() -> Array:
        out = tile_attention.attend(execution, prepare())
        return head_major(out[:, :, : request.length])

    return Plan("fused", run)


def _refusal(encoding: Encoding, request: Request) -> str | None:
    queries, keys = request.queries, request.keys
    widths = queries.content_q.shape[-1], keys.v.shape[-1]
    types = {x.dtype for x in (queries.q, queries.content_q, keys.k, keys.v)}
    if not types <= set(map(jnp.dtype, TYPES)):
        return f"a type is {min(map(str, types - set(map(jnp.dtype, TYPES))))}, not float32 or bfloat16"
    if len(types) > 1:
        return "queries, keys and values have different types"
    if min(widths) < NARROWEST or max(widths) > WIDEST:
        return f"the widths of a head, {widths}, are not between {NARROWEST} and {WIDEST}"
    return tile_attention.why_not(encoding, request)


def capability(device: str) -> int | None:
    """The compute capability of a kind of GPU, such as 90 for "NVIDIA H200"; None if its blocks
    would not fit.
    """
    words = re.findall(r"\w+", device)
    return next((number for name, number in CAPABILITIES.items() if name in words), None)


def _sizes(encoding: Encoding, request: Request) -> Sizes:
    q, v = request.queries.content_q, request.keys.v
    by_width = SIZES[q.dtype.itemsize]
    sizes = by_width[next(most for most in by_width if max(q.shape[-1], v.shape[-1]) <= most)]
    carries = jax.tree.leaves(carry_of(encoding, request)) or encoding.traits.heavy_score
    return sizes if carries else sizes._replace(keys=2 * sizes.keys)


def _blank(launch: Launch, *arrays: Array) -> Any:
    """Runs nothing: a plan only prints kernels."""
    return [jnp.zeros(x.shape, x.dtype) for x in launch.results]


def run_on_gpu(launch: Launch, *arrays: Array) -> Any:
    """Runs a kernel through jax-triton."""
    import jax_triton  # an extra, which can be imported only where JAX has CUDA

    return jax_triton.triton_call(
        *arrays,
        kernel=launch.function,
        out_shape=list(launch.results),
        grid=(launch.programs,),
        name=f"cope_jax_{launch.name}",
        num_warps=launch.warps,
        num_stages=launch.stages,
        zeroed_outputs=launch.zeroed,
        compute_capability=launch.capability,
    )
