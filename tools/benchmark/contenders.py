"""The cases of the benchmark (attention, decoding and training steps), and the contenders of each
case.

The name of an attention contender is ENCODING/IMPLEMENTATION. A contender turns a problem into two
tasks: "forward" returns out_BLHK, and "forward+backward" also returns the gradients of q, k, v and
every parameter for a fixed cotangent. JAX contenders split the heads over the problem's devices;
ring attention splits the sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cope_jax import encodings, tasks
from cope_jax.array_types import PyTree
from cope_jax.attention import Cache, attend, attend_cached, create_cache
from cope_jax.encodings import EncodingConfig
from cope_jax.registry import unknown
from cope_jax.training import from_config
from cope_jax.training.experiment_config import JobConfig, MeshConfig
from tools.benchmark.workloads import BACKWARD, FORWARD, STEP, TANGENT, Problem, Recipe
from tools.timing import Build, Case, LeftOut, Task

Contender = Callable[[Problem], Mapping[str, Task]]

IMPLEMENTATIONS = ("full", "blockwise", "fused", "ring", "auto")
OURS = tuple(
    "cope/fused rope/fused cope/blockwise cope/full cope/ring rope/blockwise rope/full rope/jax.nn".split()
)
OF_TORCH = {
    "cope/torch-bridge": "cope_in_jax",
    "cope/torch-listing": "cope_listing",
    "cope/torch-compiled": "cope_listing_compiled",
    "cope/x-transformers": "x_transformers_cope",
    "rope/torch-sdpa": "sdpa_with_rope",
}
DEFAULT = (*OURS, *OF_TORCH)
X_TRANSFORMERS = ("cope", "rope")
# About how many float32 matrices [L, L] for each head the backward pass keeps at its peak.
OF_FULL, OF_JAX_NN = 10, 6
DEVICES = "devices"  # the axis of the mesh
SEQUENCE, HEADS = 1, 2  # dimensions of q, k and v


def attention_cases(
    problems: Sequence[Problem], names: Sequence[str], reference: str
) -> list[Case]:
    """One case for each problem: attention, without and with all gradients."""
    return [
        Case(
            {"section": "attention", **vars(problem)},
            {name: functools.partial(find(name), problem) for name in names},
            reference,
            cost=problem.length**2,
        )
        for problem in problems
    ]


def decoding_case(problem: Problem, specs: Sequence[str]) -> Case:
    """The case in which one new token attends to a cached context of the problem's length, with
    each encoding.
    """
    fields = {"section": "decode", "context": problem.length, **vars(problem)}
    builds = {spec: functools.partial(decode, spec, problem) for spec in specs}
    return Case(fields, builds, specs[0], cost=problem.length * 100)


def training_case(recipe: Recipe, names: Sequence[str], devices: int) -> Case:
    """Training steps of a recipe: each encoding in our decoder, and CoPE and RoPE in the decoder of
    x-transformers.

    The batch is split over as many of the devices as can share it evenly.
    """
    shares = math.gcd(recipe.config.training.batch_size, devices)
    builds: dict[str, Build] = {
        name: functools.partial(train, recipe, name, shares) for name in names
    }
    for name in X_TRANSFORMERS:
        step = functools.partial(of_torch, "x_transformers_step", recipe, name)
        builds[f"{name}, x-transformers"] = step
    fields = {"section": "train", "recipe": recipe.label, "devices": shares}
    return Case(fields, builds, names[0], cost=recipe.batch()["inputs"].size * 500)


def find(name: str) -> Contender:
    """Finds the contender with this name: one of `CONTENDERS`, or any encoding with an
    implementation of `attend`.

    >>> tasks = find("alibi/full")(Problem(length=4, heads=2, head_dim=8))
    >>> tasks["forward"]().shape
    (1, 4, 2, 8)
    """
    spec, _, implementation = name.rpartition("/")
    if name in CONTENDERS:
        return CONTENDERS[name]
    if not spec or implementation not in IMPLEMENTATIONS:
        encoding = name.partition("/")[0]
        EncodingConfig.parse(encoding)
        ours = [f"{encoding}/{how}" for how in IMPLEMENTATIONS]
        of_any = "ENCODING/IMPLEMENTATION of any encoding"
        raise unknown("contender", name, [*CONTENDERS, *ours, of_any])
    EncodingConfig.parse(spec)
    return functools.partial(_ours, spec, implementation)


def _ours(spec: str, implementation: str, problem: Problem) -> Mapping[str, Task]:
    """The tasks of an encoding in `cope_jax.attention.attend`."""
    merge, params = problem.encoding(spec)
    options: Any = {"implementation": implementation, "embedded": True}
    if implementation == "full":
        problem.check_square(OF_FULL)
    if implementation == "ring":
        if problem.devices == 1 or problem.length % problem.devices:
            raise LeftOut(
                f"ring attention needs several devices that can share a length of {problem.length}, "
                f"but has {problem.devices}: choose other --devices"
            )
        options["sequence_axis"] = DEVICES
    # XLA would let the loops of all devices wait for each other, and cannot split a kernel.
    alone = problem.devices > 1 and implementation != "ring" and _alike(merge(params))
    if problem.devices > 1 and implementation == "fused" and not alone:
        raise LeftOut(f"the heads of {spec} differ, so that devices cannot share its kernel")
    if alone:
        heads = problem.heads // problem.devices
        merge, _ = dataclasses.replace(problem, heads=heads, devices=1).encoding(spec)

    def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, encoding=merge(params), x=layer_input(q), **options)

    if alone:
        split = PartitionSpec(None, None, DEVICES)
        specs = (PartitionSpec(), split, split, split)
        attention = jax.shard_map(attention, in_specs=specs, out_specs=split, check_vma=False)
    return _tasks(attention, params, problem, SEQUENCE if implementation == "ring" else HEADS)


def _alike(encoding: encodings.Encoding) -> bool:
    """True if all heads have the same parameters and constants."""
    if not encoding.traits.splits_heads:
        return False
    parts: Any = (nnx.split(encoding.of_head(head)) for head in (0, encoding.shape.num_heads - 1))
    (first, first_state), (last, last_state) = parts
    return first == last and jax.tree.all(jax.tree.map(np.array_equal, first_state, last_state))


def layer_input(q_BLHK: jax.Array) -> jax.Array:
    """The input of the layer, x_BLD, for encodings that read it: here the queries."""
    return q_BLHK.reshape(*q_BLHK.shape[:2], -1)


def _jax_nn(implementation: Literal["cudnn"] | None, problem: Problem) -> Mapping[str, Task]:
    """The tasks of `jax.nn.dot_product_attention`, after our rotation of queries and keys."""
    if implementation is None:
        problem.check_square(OF_JAX_NN)
    elif jax.default_backend() != "gpu":
        raise LeftOut("cuDNN needs an NVIDIA GPU")
    sizes = {"num_heads": problem.heads, "head_dim": problem.head_dim}
    rope = encodings.create("rope", **sizes, rngs=nnx.Rngs(0))

    def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        q, k = rope.rotate(q, (), positions), rope.rotate_keys(k, (), positions)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    return _tasks(attention, {}, problem, HEADS)


class Compiled:
    """A function with its arguments, compiled at first use.

    A call computes the function and waits for the result.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh):
        self._function, self._arguments, self._mesh = function, arguments, mesh
        with jax.set_mesh(mesh):
            jax.eval_shape(function, *arguments)  # so that errors are raised now

    @functools.cached_property
    def _compiled(self) -> Any:
        with jax.set_mesh(self._mesh):
            return jax.jit(self._function).lower(*self._arguments).compile()

    @property
    def temp_bytes(self) -> int | None:
        """The bytes that XLA allocates in addition to arguments and results; None if XLA does not
        report them.
        """
        return getattr(self._compiled.memory_analysis(), "temp_size_in_bytes", None)

    def __call__(self) -> Any:
        return jax.block_until_ready(self._compiled(*self._arguments))


def _tasks(
    attention: Callable[..., jax.Array], params: PyTree, problem: Problem, split: int
) -> Mapping[str, Task]:
    """The tasks of (params, q, k, v) → out, split over the devices along a dimension of q, k, v."""
    devices = jax.devices()[: problem.devices]
    mesh = jax.make_mesh((len(devices),), (DEVICES,), axis_types=(AxisType.Auto,), devices=devices)
    arrays = [jnp.asarray(array, problem.dtype) for array in problem.arrays()]
    q, k, v, cotangent = jax.device_put(
        arrays, NamedSharding(mesh, PartitionSpec(*[None] * split, DEVICES))
    )
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))

    def forward_and_backward(
        params: Any, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array
    ) -> Any:
        out, pull = jax.vjp(attention, params, q, k, v)
        of_params, *of_inputs = pull(cotangent)
        return out, *of_inputs, *jax.tree.leaves(of_params)

    def forward_and_tangent(params: Any, *inputs: jax.Array) -> Any:
        return jax.jvp(functools.partial(attention, params), inputs, inputs)

    compiled = {
        FORWARD: Compiled(attention, params, q, k, v, mesh=mesh),
        BACKWARD: Compiled(forward_and_backward, params, q, k, v, cotangent, mesh=mesh),
    }
    if problem.jvp:
        compiled[TANGENT] = Compiled(forward_and_tangent, params, q, k, v, mesh=mesh)
    return compiled


def decode(spec: str, problem: Problem) -> Mapping[str, Task]:
    """Returns a task that adds one token to a cache of L − 1 tokens, in place, and lets it attend
    to all L tokens.

    Each call of the task returns out_B1HK, and adds the same token in the same place, so the
    context does not grow.
    """
    merge, params = problem.encoding(spec)
    q, k, v, _ = (jnp.asarray(array, problem.dtype) for array in problem.arrays())

    def enter(params: Any, cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
        positions_BL = cache.filled + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        return cache.enter(positions_BL).append(
            q, k, v, encoding=merge(params), x_BLD=layer_input(q)
        )

    @functools.partial(jax.jit, donate_argnums=1)
    def run(
        params: Any, cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Cache]:
        cache = enter(params, cache, q, k, v)
        out = attend_cached(q, cache, encoding=merge(params), embedded=True)
        return out, dataclasses.replace(cache, filled=cache.filled - 1)

    empty = create_cache(
        merge(params), batch=problem.batch, capacity=problem.length, dtype=problem.dtype
    )
    cache = jax.jit(enter)(params, empty, q[:, :-1], k[:, :-1], v[:, :-1])
    token = q[:, -1:], k[:, -1:], v[:, -1:]

    def task() -> jax.Array:
        nonlocal cache
        out, cache = run(params, cache, *token)
        return jax.block_until_ready(out)

    return {"attention of one token": task}


def train(recipe: Recipe, encoding: str, devices: int = 1) -> Mapping[str, Task]:
    """One training step as in the training loop, with the batch split over the devices."""
    job = JobConfig(mesh=MeshConfig(data=devices))
    config = dataclasses.replace(recipe.config, encoding=encoding, job=job)
    task = tasks.create(config.task.name, **config.task.options)
    program = from_config.create_program(config, task, devices=jax.devices()[:devices])
    state = program.init([0])
    batch = jax.tree.map(lambda array: array[None], dict(recipe.batch()))
    batches = program.place(batch, config.training.batch_size)

    def step() -> float:
        nonlocal state
        state, metrics = program.train_steps(state, batches)
        return float(np.asarray(jax.block_until_ready(metrics["loss"])).item())

    return {STEP: step}


def of_torch(function: str, *arguments: Problem | Recipe | str) -> Mapping[str, Task]:
    """The tasks that a function of `torch_contenders` returns.

    Raises LeftOut if PyTorch is not installed.
    """
    try:
        from tools.benchmark import torch_contenders

        return getattr(torch_contenders, function)(*arguments)
    except ModuleNotFoundError as error:
        raise LeftOut(
            f"{error.name} is not installed: run pip install 'cope-jax[bench]'"
        ) from error


CONTENDERS: dict[str, Contender] = {
    "rope/jax.nn": functools.partial(_jax_nn, None),
    "rope/cudnn": functools.partial(_jax_nn, "cudnn"),
}
CONTENDERS |= {name: functools.partial(of_torch, function) for name, function in OF_TORCH.items()}
