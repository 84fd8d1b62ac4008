"""Attention on NVIDIA GPUs by Triton kernels, for encodings whose `native_score` says what they
add.

The kernels are written in Triton and called through jax-triton, because Pallas' own Triton backend
is deprecated since JAX 0.11, Mosaic GPU has neither gathers nor running sums, and CUDA C++ would
need nvcc on every machine. Triton brings its own compiler, and an interpreter that runs the same
source on a CPU.
"""

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array
from cope_jax.attention import placement
from cope_jax.attention.derivative import RESIDUALS
from cope_jax.attention.kernels import arguments
from cope_jax.attention.kernels.arguments import GATES, Arrays
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.encodings import Encoding

NAME = "the Triton kernels"
INSTALL = "pip install 'cope-jax[gpu-kernels]'"
NARROWEST, WIDEST = 16, 256  # heads
CAPABILITIES = {"A100": 80, "H100": 90, "H200": 90, "B200": 100}
"""Compute capabilities by a word in the name of a GPU: those whose shared memory holds the blocks
below.
"""


class Sizes(NamedTuple):
    """The numbers of queries and keys of a block; `far` is for keys beyond those that are counted
    one by one.
    """

    queries: int
    keys: int
    far: int
    warps: int
    stages: int


# In bfloat16 these blocks spill no registers, or few, up to a width of 128: see docs/attention.md.
_SIZES = {
    ("forward", 2): {
        64: Sizes(128, 32, 64, 8, 2),
        128: Sizes(128, 32, 64, 8, 2),
        256: Sizes(64, 16, 32, 8, 2),
    },
    ("backward", 2): {
        64: Sizes(64, 16, 64, 4, 2),
        128: Sizes(64, 16, 32, 8, 2),
        256: Sizes(32, 16, 32, 8, 1),
    },
    ("forward", 4): {
        64: Sizes(64, 16, 32, 4, 2),
        128: Sizes(64, 16, 32, 8, 2),
        256: Sizes(32, 16, 32, 8, 2),
    },
    ("backward", 4): {
        64: Sizes(64, 16, 32, 8, 1),
        128: Sizes(32, 16, 32, 8, 1),
        256: Sizes(16, 16, 16, 8, 1),
    },
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel in `gpu_kernels`.

    Attributes:
      kernel: its name.
      constants: its constants, without the sizes of blocks.
      sizes: the sizes of blocks.
      heads: the number of heads of all examples.
      results: what it writes.
      zeroed: the places of the results that it adds to, and that must be 0 before.
      capability: the compute capability that it is compiled for.
    """

    kernel: str
    constants: Mapping[str, Any]
    sizes: Sizes
    heads: int
    results: tuple[jax.ShapeDtypeStruct, ...]
    zeroed: tuple[int, ...]
    capability: int | None

    @property
    def programs(self) -> int:
        """The number of programs: blocks of queries of all heads."""
        return self.heads * -(-self.constants["L"] // self.sizes.queries)

    @property
    def metaparameters(self) -> dict[str, Any]:
        """All constants of the kernel."""
        blocks = {"QUERIES": self.sizes.queries, "KEYS": self.sizes.keys, "FAR": self.sizes.far}
        return {**self.constants, **blocks}


Run = Callable[..., Any]
"""Called as `run(launch, *arrays)`; returns what the kernel writes."""


class _Options(NamedTuple):
    """Facts that the kernels know when they are compiled, besides shapes."""

    device: str
    run: Run
    causal: bool
    window: int  # 0: none
    gates: int  # the place in GATES


def plan(
    encoding: Encoding, request: Request, *, device: str | None = None, run: Run | None = None
) -> Plan | Reason:
    """Returns the plan to compute the result of `blockwise_attention` in Triton, or why this is not
    possible.

    Memory is linear in the length, with N logits of positions for each query and head. Sums are
    float32 whatever the type of the inputs. Gradients of keys and of the table are added up in any
    order, so their last bits differ from run to run.

    Args:
      encoding: the encoding.
      request: the request.
      device: the kind of GPU; None means the current one.
      run: what runs the kernels; None for jax-triton on the GPU.
    """
    device = device or placement.current_device()
    queries, keys = request.queries, request.keys
    widths = queries.rotated_q.shape[-1], keys.v.shape[-1]
    if capability(device) is None:
        return Reason(f"the Triton kernels were not compiled for the device {device!r}")
    if why := arguments.why_not(NAME, request):
        return Reason(why)
    if min(widths) < NARROWEST or max(widths) > WIDEST:
        return Reason(f"the widths of a head, {widths}, are not between {NARROWEST} and {WIDEST}")
    if len({x.dtype for x in (queries.q, queries.rotated_q, keys.k, keys.v)}) > 1:
        return Reason("queries, keys and values have different types")
    if run is None and not all(importlib.util.find_spec(name) for name in ("triton", "jax_triton")):
        return Reason(f"jax-triton is not installed ({INSTALL})")
    score = arguments.score_of(NAME, encoding, request)
    if isinstance(score, str):
        return Reason(score)
    gates = GATES.index(score.gates)
    options = _Options(
        device, run or run_on_gpu, request.causal, arguments.window_of(request), gates
    )
    arrays, segments = arguments.arrays_of(score, request), arguments.segments_of(request)
    return Plan("fused", lambda: _attend(options, arrays, segments))


def capability(device: str) -> int | None:
    """The compute capability of a kind of GPU, such as 90 for "NVIDIA H200"; None if its blocks
    would not fit.
    """
    words = re.findall(r"\w+", device)
    return next((number for name, number in CAPABILITIES.items() if name in words), None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, arrays: Arrays, segments: tuple[Array, Array]) -> Array:
    return _forward(options, arrays, segments)[0]


def _forward(options: _Options, arrays: Arrays, segments: tuple[Array, Array]) -> tuple[Array, Any]:
    batch, length, heads, _ = arrays.q.shape
    out = jax.ShapeDtypeStruct((batch, length, heads, arrays.v.shape[-1]), arrays.v.dtype)
    logsumexp = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
    results = _call("forward", options, _read(options, arrays), segments, (), (out, logsumexp))
    results = checkpoint_name(results, RESIDUALS)
    return results[0], (arrays, segments, *results)


def _backward(options: _Options, kept: Any, dout_BLHK: Array) -> tuple[Any, Any]:
    arrays, segments, out, logsumexp = kept
    read, pull = jax.vjp(functools.partial(_read, options), arrays)
    delta = (out.astype(jnp.float32) * dout_BLHK.astype(jnp.float32)).sum(-1)
    # A program writes the gradients of its own queries; all programs add to the others.
    written = {"q", "x"}
    results = [
        jax.ShapeDtypeStruct(
            x.shape if x.size else (1,), x.dtype if name in written else jnp.float32
        )
        for name, x in read._asdict().items()
    ]
    zeroed = tuple(n for n, name in enumerate(Arrays._fields) if name not in written)
    dread = _call(
        "backward", options, read, segments, (dout_BLHK, logsumexp, delta), results, zeroed
    )
    gradients = (
        dx.astype(x.dtype) if x.size else jnp.zeros_like(x)
        for dx, x in zip(dread, read, strict=True)
    )
    return *pull(Arrays(*gradients)), None


_attend.defvjp(_forward, _backward)


def _read(options: _Options, arrays: Arrays) -> Arrays:
    """Returns the arrays that kernels read: z_BLHN in place of the table, and x only if gates are
    of keys.
    """
    none, x_BLHK = jnp.zeros((0,), jnp.float32), arrays.x
    z_BLHN = none
    if arrays.table.size:
        wide = x_BLHK.astype(jnp.float32), arrays.table.astype(jnp.float32)
        z_BLHN = jnp.einsum("BLHK,NK->BLHN", *wide, precision="highest")
    x_BLHK = x_BLHK if GATES[options.gates] == "keys" else none
    return arrays._replace(
        x=x_BLHK,
        u=arrays.u.astype(x_BLHK.dtype),
        table=z_BLHN,
        slopes=arrays.slopes.astype("float32"),
    )


def _call(
    name: str,
    options: _Options,
    arrays: Arrays,
    segments: tuple[Array, Array],
    others: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    zeroed: Sequence[int] = (),
) -> Any:
    """Runs the kernel of this name for all examples and heads; with `jax.vmap`, once for each
    entry.
    """
    (batch, length, heads, width), (_, keys, groups, v_width) = arrays.q.shape, arrays.v.shape
    constants = {
        "L": length,
        "M": keys,
        "H": heads,
        "G": groups,
        "K": width,
        "V": v_width,
        "N": arrays.table.shape[-1],
        "CAUSAL": options.causal,
        "WINDOW": options.window,
        "SEGMENTS": bool(segments[0].size),
        "GATES": options.gates,
        "SCALE": 1 / math.sqrt(width),
    }
    by_width = _SIZES[name, arrays.q.dtype.itemsize]
    sizes = by_width[next(most for most in by_width if max(width, v_width) <= most)]
    launch = Launch(
        name,
        constants,
        sizes,
        batch * heads,
        tuple(results),
        tuple(zeroed),
        capability(options.device),
    )
    # A kernel does not read what the options exclude, but needs an array in its place.
    given = (x if x.size else jnp.zeros((1,), x.dtype) for x in (*arrays, *segments, *others))
    return jax.custom_batching.sequential_vmap(functools.partial(options.run, launch))(*given)


def run_on_gpu(launch: Launch, *arrays: Array) -> Any:
    """Runs a kernel through jax-triton."""
    import jax_triton  # an extra, which can be imported only where JAX has CUDA

    from cope_jax.attention.kernels.gpu import gpu_kernels

    return jax_triton.triton_call(
        *arrays,
        kernel=getattr(gpu_kernels, launch.kernel),
        out_shape=list(launch.results),
        grid=(launch.programs,),
        name=f"cope_jax_{launch.kernel}",
        num_warps=launch.sizes.warps,
        num_stages=launch.sizes.stages,
        zeroed_outputs=launch.zeroed,
        compute_capability=launch.capability,
        **launch.metaparameters,
    )
