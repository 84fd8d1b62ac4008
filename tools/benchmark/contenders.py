"""The cases of the benchmark (attention, decoding and training steps), and the contenders of each
case.

The name of an attention contender is ENCODING/IMPLEMENTATION. A contender turns a problem into two
tasks: "forward" returns out_BLHK, and "forward+backward" also returns the gradients of q, k, v and
every parameter for a fixed cotangent. JAX contenders split the heads over the problem's devices;
ring attention splits the sequence.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax import encodings, tasks
from cope_jax.array_types import PyTree
from cope_jax.attention import Cache, attend, attend_cached, create_cache
from cope_jax.encodings import EncodingConfig
from cope_jax.registry import unknown
from cope_jax.training import from_config
from cope_jax.training.experiment_config import JobConfig, MeshConfig
from tools.benchmark.devices import AXIS, Attention, Plan, split_heads, split_sequence
from tools.benchmark.workloads import BACKWARD, FORWARD, STEP, Problem, Recipe
from tools.timing import Build, Case, LeftOut, Task, WithNote

Contender = Callable[[Problem], Mapping[str, Task]]

IMPLEMENTATIONS = ("full", "blockwise", "fused", "ring", "auto")
OURS = (
    "cope/fused",
    "rope/fused",
    "cope/blockwise",
    "cope/full",
    "cope/ring",
    "rope/blockwise",
    "rope/full",
    "rope/jax.nn",
)
OF_TORCH = {
    "cope/torch-listing": "cope_listing",
    "cope/x-transformers": "x_transformers_cope",
    "rope/torch-sdpa": "sdpa_with_rope",
}
DEFAULT = (*OURS, *OF_TORCH)
X_TRANSFORMERS = ("cope", "rope")
# About how many float32 matrices [L, L] for each head the backward pass keeps at its peak.
OF_FULL, OF_JAX_NN = 10, 6


def attention_cases(
    problems: Sequence[Problem], names: Sequence[str], reference: str
) -> list[Case]:
    """One case for each problem: attention, without and with all gradients."""
    built = []
    for problem in problems:
        builds = {name: functools.partial(find(name), problem) for name in names}
        built.append(
            Case(
                {"section": "attention", **vars(problem)}, builds, reference, cost=problem.length**2
            )
        )
    return built


def decoding_case(problem: Problem, specs: Sequence[str]) -> Case:
    """The case in which one new token attends to a cached context of the problem's length, with
    each encoding.
    """
    fields = {"section": "decode", "context": problem.length, **vars(problem)}
    builds = {spec: functools.partial(decode, spec, problem) for spec in specs}
    return Case(fields, builds, specs[0], cost=problem.length * 100)


def training_cases(recipes: Sequence[Recipe], names: Sequence[str], devices: int) -> list[Case]:
    """One case for each recipe: each encoding in our decoder, and CoPE and RoPE in the decoder of
    x-transformers.
    """
    built = []
    for recipe in recipes:
        builds: dict[str, Build] = {
            name: functools.partial(train, recipe, name, devices) for name in names
        }
        for name in X_TRANSFORMERS:
            builds[f"{name}, x-transformers"] = functools.partial(
                of_torch, "x_transformers_step", recipe, name
            )
        fields = {"section": "train", "recipe": recipe.label, "devices": devices}
        built.append(Case(fields, builds, names[0], cost=recipe.batch()["inputs"].size * 500))
    return built


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
        ours = [f"{encoding}/{how}" for encoding in encodings.names() for how in IMPLEMENTATIONS]
        raise unknown("contender", name, [*CONTENDERS, *ours])
    EncodingConfig.parse(spec)
    return functools.partial(_ours, spec, implementation)


def _ours(spec: str, implementation: str, problem: Problem) -> Mapping[str, Task]:
    """The tasks of an encoding in `cope_jax.attention.attend`."""
    options: Any = {"implementation": implementation, "embedded": True}
    if implementation == "ring":
        options["sequence_axis"] = AXIS

    def build(problem: Problem) -> tuple[Attention, PyTree]:
        merge, params = problem.encoding(spec)

        def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q, k, v, encoding=merge(params), x=layer_input(q), **options)

        return attention, params

    if implementation == "ring":
        return _tasks(split_sequence(*build(problem), problem), problem)
    if implementation == "full":
        problem.check_square(OF_FULL)
    return _tasks(split_heads(build, problem), problem)


def layer_input(q_BLHK: jax.Array) -> jax.Array:
    """The input of the layer, x_BLD, for encodings that read it: here the queries."""
    return q_BLHK.reshape(*q_BLHK.shape[:2], -1)


def _jax_nn(implementation: Literal["cudnn"] | None, problem: Problem) -> Mapping[str, Task]:
    """The tasks of `jax.nn.dot_product_attention`, after our rotation of queries and keys."""
    if implementation is None:
        problem.check_square(OF_JAX_NN)
    elif jax.default_backend() != "gpu":
        raise LeftOut("cuDNN needs an NVIDIA GPU")

    def build(problem: Problem) -> tuple[Attention, PyTree]:
        rope = encodings.create(
            "rope", num_heads=problem.heads, head_dim=problem.head_dim, rngs=nnx.Rngs(0)
        )

        def attention(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            q, k = rope.rotate(q, (), positions), rope.rotate_keys(k, (), positions)
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )

        return attention, {}

    return _tasks(split_heads(build, problem), problem)


class Compiled:
    """A function with its arguments, compiled at first use.

    A call computes the function and waits for the result.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, plan: Plan):
        self._function, self._arguments = function, arguments
        self._context = (
            functools.partial(jax.set_mesh, plan.mesh) if plan.mesh else contextlib.nullcontext
        )
        with self._context():
            jax.eval_shape(function, *arguments)  # so that errors are raised now

    @functools.cached_property
    def _compiled(self) -> Any:
        with self._context():
            return jax.jit(self._function).lower(*self._arguments).compile()

    @property
    def temp_bytes(self) -> int | None:
        """The bytes that XLA allocates in addition to arguments and results; None if XLA does not
        report them.
        """
        return getattr(self._compiled.memory_analysis(), "temp_size_in_bytes", None)

    def __call__(self) -> Any:
        return jax.block_until_ready(self._compiled(*self._arguments))


def _tasks(plan: Plan, problem: Problem) -> Mapping[str, Task]:
    arrays = [jnp.asarray(array, problem.dtype) for array in problem.arrays()]
    params, (q, k, v, cotangent) = plan.place(plan.params, arrays)

    def forward_and_backward(
        params: Any, q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array
    ) -> Any:
        out, pull = jax.vjp(plan.attention, params, q, k, v)
        of_params, *of_inputs = pull(cotangent)
        return out, *of_inputs, *jax.tree.leaves(of_params)

    tasks = {
        FORWARD: Compiled(plan.attention, params, q, k, v, plan=plan),
        BACKWARD: Compiled(forward_and_backward, params, q, k, v, cotangent, plan=plan),
    }
    return WithNote(tasks, plan.note) if plan.note else tasks


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
    """One training step as in the training loop.

    The batch is split over the devices if it can be split evenly.
    """
    size = recipe.config.training.batch_size
    shares = 1 if size % devices else devices
    config = dataclasses.replace(
        recipe.config, encoding=encoding, job=JobConfig(mesh=MeshConfig(data=shares))
    )
    task = tasks.create(config.task.name, **config.task.options)
    program = from_config.create_program(config, task, devices=jax.devices()[:shares])
    state = program.init([0])
    batches = program.place(jax.tree.map(lambda array: array[None], dict(recipe.batch())), size)

    def step() -> float:
        nonlocal state
        state, metrics = program.train_steps(state, batches)
        return float(np.asarray(jax.block_until_ready(metrics["loss"])).item())

    if shares < devices:
        return WithNote(
            {STEP: step}, f"on 1 device, because {devices} devices cannot share a batch of {size}"
        )
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
