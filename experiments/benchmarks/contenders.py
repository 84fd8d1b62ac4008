"""Who takes part in the attention benchmark: a name, ENCODING/EXECUTION, and one small function each.

A contender makes of a problem two tasks: "forward", which returns out_BLHK, and "forward+backward", which returns it
with the gradients of q, k, v and of every parameter for a fixed cotangent. JAX's split the heads over the problem's
devices, and a ring splits the sequence.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from cope_jax import encodings
from cope_jax.attention import attend
from cope_jax.encodings import EncodingConfig
from cope_jax.registry import Registry, unknown
from cope_jax.typing import PyTree
from experiments.benchmarks.case import LeftOut, Noted
from experiments.benchmarks.devices import AXIS, Split
from experiments.benchmarks.heads import Attention, Plan
from experiments.benchmarks.problem import Problem
from experiments.benchmarks.timing import Task

Contender = Callable[[Problem], Mapping[str, Task]]

FORWARD, BACKWARD = "forward", "forward+backward"
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
    if implementation == "ring":
        return _tasks(_ring(spec, problem), problem)
    return _tasks(Plan.of(functools.partial(_attend, spec, implementation=implementation), problem), problem)


def _attend(spec: str, problem: Problem, **options: Any) -> tuple[Attention, PyTree]:
    encoding = EncodingConfig.parse(spec, {"cope": {"npos_max": problem.npos_max}}).build(
        problem.shape, rngs=nnx.Rngs(0)
    )
    parts: Any = nnx.split(encoding, nnx.Param, ...)
    graph, initial, rest = parts
    params = jax.tree.map(problem.trained, initial)

    def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, encoding=nnx.merge(graph, params, rest), embedded=True, **options)

    return attention, params


def _ring(spec: str, problem: Problem) -> Plan:
    """The sequence is split over the devices."""
    devices = problem.devices
    if devices == 1:
        raise LeftOut("a ring takes several devices, and has 1")
    if problem.length % devices:
        raise LeftOut(f"{devices} devices take a length that is a multiple of {devices}")
    attention, params = _attend(spec, problem, implementation="ring", sequence_axis=AXIS)
    return Plan(attention, params, Split.over(devices, dimension=1))


@CONTENDERS.register("rope/jax.nn")
def _jax_nn(problem: Problem) -> Mapping[str, Task]:
    """`jax.nn.dot_product_attention` after our rotation."""
    problem.check_square(OF_JAX_NN)

    def build(problem: Problem) -> tuple[Attention, PyTree]:
        rope = encodings.create("rope", num_heads=problem.heads, head_dim=problem.head_dim, rngs=nnx.Rngs(0))

        def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            q, k = rope.rotate(q, k, (), (), positions, positions)
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        return attention, {}

    return _tasks(Plan.of(build, problem), problem)


class Compiled:
    """A function with its arguments, compiled at first use; a call computes it and waits for the result.

    Args:
      function: under the mesh, if there is one.
      *arguments: where they are needed.
      mesh: of devices that share the work.
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


def _tasks(plan: Plan, problem: Problem) -> Mapping[str, Task]:
    attention, params, mesh = plan.attention, plan.params, None
    arrays = [jnp.asarray(array, problem.dtype) for array in problem.arrays()]
    if plan.split:
        arrays, params, mesh = plan.split.share(arrays), plan.split.copy(params), plan.split.mesh
    q, k, v, cotangent = arrays

    def forward_and_backward(params: Any, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        out, pull = jax.vjp(attention, params, q, k, v)
        of_params, *of_inputs = pull(cotangent)
        return out, *of_inputs, *jax.tree.leaves(of_params)

    tasks = {
        FORWARD: Compiled(attention, params, q, k, v, mesh=mesh),
        BACKWARD: Compiled(forward_and_backward, params, q, k, v, cotangent, mesh=mesh),
    }
    return Noted(tasks, plan.note) if plan.note else tasks


def _of_torch(function: str) -> Contender:
    """A contender of torch_contenders, which is imported only where torch is installed."""

    def contender(problem: Problem) -> Mapping[str, Task]:
        try:
            module = importlib.import_module("experiments.benchmarks.torch_contenders")
            return getattr(module, function)(problem)
        except ModuleNotFoundError as error:
            raise LeftOut(f"{error.name} is not installed: pip install -e '.[bench]'") from error

    return contender


CONTENDERS.register("cope/torch-listing")(_of_torch("cope_listing"))
CONTENDERS.register("cope/x-transformers")(_of_torch("x_transformers_cope"))
CONTENDERS.register("rope/torch-sdpa")(_of_torch("sdpa_with_rope"))
