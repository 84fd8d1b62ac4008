"""Who takes part in the attention benchmark: a name, ENCODING/EXECUTION, and one small function each.

A contender makes of a problem two tasks: "forward", which returns out_BLHK, and "forward+backward", which returns it
with the gradients of q, k, v and of every parameter for a fixed cotangent.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax import encodings
from cope_jax.attention import attend
from cope_jax.encodings import EncodingConfig
from cope_jax.registry import Registry, unknown
from experiments.benchmarks.case import LeftOut
from experiments.benchmarks.problem import Problem
from experiments.benchmarks.timing import Task

Contender = Callable[[Problem], Mapping[str, Task]]

FORWARD, BACKWARD = "forward", "forward+backward"
AXIS = "sequence"
CONTENDERS: Registry[Contender] = Registry("contender")
IMPLEMENTATIONS = ("full", "blockwise", "ring", "auto")
DEFAULT = (
    "cope/blockwise",
    "cope/full",
    "cope/ring",
    "rope/blockwise",
    "rope/full",
    "rope/jax.nn",
    "cope/torch-listing",
    "cope/x-transformers",
    "rope/torch-sdpa",
)
# Matrices of all pairs, float32, that backward holds at its peak, roughly.
OF_FULL, OF_JAX_NN = 10, 6


def find(name: str) -> Contender:
    """The contender of a name: a registered one, or any encoding with an implementation of `attend`.

    >>> tasks = find("alibi/full")(Problem(length=4, heads=2, head_dim=8))
    >>> tasks["forward"]().shape
    (1, 4, 2, 8)
    >>> find("rope/torch")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown contender 'rope/torch': did you mean 'rope/torch-sdpa'? Choices: ...
    """
    spec, _, implementation = name.rpartition("/")
    if name not in CONTENDERS and spec and implementation in IMPLEMENTATIONS:
        EncodingConfig.parse(spec)
        return functools.partial(_ours, spec, implementation)
    if name not in CONTENDERS:
        own = [f"{encoding}/{how}" for encoding in encodings.names() for how in IMPLEMENTATIONS]
        raise unknown("contender", name, [*CONTENDERS, *own])
    return CONTENDERS.get(name)


def _ours(spec: str, implementation: str, problem: Problem) -> Mapping[str, Task]:
    """An encoding in `cope_jax.attention.attend`."""
    if implementation == "full":
        problem.check_square(OF_FULL)
    mesh = _ring_mesh(problem) if implementation == "ring" else None
    options: dict[str, Any] = {"sequence_axis": AXIS} if mesh else {}
    encoding = EncodingConfig.parse(spec, {"cope": {"npos_max": problem.npos_max}}).build(
        problem.shape, rngs=nnx.Rngs(0)
    )
    parts: Any = nnx.split(encoding, nnx.Param, ...)
    graph, initial, rest = parts
    params = jax.tree.map(problem.trained, initial)

    def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        encoding = nnx.merge(graph, params, rest)
        return attend(q, k, v, encoding=encoding, implementation=implementation, **options)

    return _tasks(attention, params, problem, mesh)


def _ring_mesh(problem: Problem) -> Mesh:
    """All devices as one axis, along which the sequence is split."""
    devices = jax.device_count()
    if devices == 1:
        raise LeftOut("a ring takes several devices, and there is 1")
    if problem.length % devices:
        raise LeftOut(f"{devices} devices take a length that is a multiple of {devices}")
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))


@CONTENDERS.register("rope/jax.nn")
def _jax_nn(problem: Problem) -> Mapping[str, Task]:
    """`jax.nn.dot_product_attention` after our rotation."""
    problem.check_square(OF_JAX_NN)
    rope = encodings.create("rope", num_heads=problem.heads, head_dim=problem.head_dim, rngs=nnx.Rngs(0))
    positions = jnp.arange(problem.length, dtype=jnp.int32)[None]

    def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k = rope.rotate(q, k, positions, positions)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return _tasks(attention, {}, problem)


class Compiled:
    """A function with its arguments, compiled at first use; a call computes it and waits for the result.

    Args:
      function: under the mesh, if there is one.
      *arguments: where they are needed.
      mesh: of a ring.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None):
        self._function = function
        self._arguments = arguments
        self._context = functools.partial(jax.set_mesh, mesh) if mesh else contextlib.nullcontext
        with self._context():
            jax.eval_shape(function, *arguments)  # so that what is wrong shows now

    @functools.cached_property
    def _compiled(self) -> Any:
        with self._context():
            return jax.jit(self._function).lower(*self._arguments).compile()

    @property
    def temp_bytes(self) -> int | None:
        """What XLA allocates beside arguments and results."""
        return getattr(self._compiled.memory_analysis(), "temp_size_in_bytes", None)

    def __call__(self) -> Any:
        return jax.block_until_ready(self._compiled(*self._arguments))


def _tasks(
    attention: Callable[..., jax.Array], params: Any, problem: Problem, mesh: Mesh | None = None
) -> Mapping[str, Task]:
    arrays = [jnp.asarray(array, problem.dtype) for array in problem.arrays()]
    if mesh:
        arrays = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(None, AXIS)))
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    q, k, v, cotangent = arrays

    def forward_and_backward(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        out, pull = jax.vjp(attention, params, q, k, v)
        of_params, *of_inputs = pull(cotangent)
        return out, *of_inputs, *jax.tree.leaves(of_params)

    return {
        FORWARD: Compiled(attention, params, q, k, v, mesh=mesh),
        BACKWARD: Compiled(forward_and_backward, params, q, k, v, cotangent, mesh=mesh),
    }


def _of_torch(function: str) -> Contender:
    """A contender of torch_contenders, which is imported only where torch is installed."""

    def contender(problem: Problem) -> Mapping[str, Task]:
        try:
            module = importlib.import_module("experiments.benchmarks.torch_contenders")
            return getattr(module, function)(problem)
        except ModuleNotFoundError as error:
            raise LeftOut(f"{error.name} is not installed: pip install 'cope-jax[bench]'") from error

    return contender


CONTENDERS.register("cope/torch-listing")(_of_torch("cope_listing"))
CONTENDERS.register("cope/x-transformers")(_of_torch("x_transformers_cope"))
CONTENDERS.register("rope/torch-sdpa")(_of_torch("sdpa_with_rope"))
