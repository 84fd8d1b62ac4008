"""The JAX side of the bridge to PyTorch: programs that are compiled once for each shape.

This module imports JAX; `torch_op` imports it at the first call.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# PyTorch allocates on the same GPU, so JAX must not take most of its memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax import encodings
from cope_jax.array_types import Array, PyTree
from cope_jax.attention import attend
from cope_jax.errors import ConfigError
from cope_jax.torch.torch_op import PARAMETER

PLATFORMS = {"cpu": "cpu", "cuda": "cuda"}
"""The platforms of JAX by the types of PyTorch's devices."""
Shape = tuple[tuple[int, ...], str]
"""The shape of an array and the name of its type."""


class Call(NamedTuple):
    """The name of a call's hook, its encoding and its options: all but its arrays.

    An operator gets it as JSON, so a graph that torch.compile keeps on disk is valid in every
    process.

    Attributes:
      hook: "attend", or "embed" for the hook of that name.
      encoding: JSON of (name and options of each part of the encoding, arguments of
        `AttentionShape`).
      names: the name of each array.
      options: the arguments that are no arrays.
      wrt: the numbers of the arrays that need a gradient.
    """

    hook: str
    encoding: str
    names: Sequence[str]
    options: Mapping[str, Any]
    wrt: Sequence[int]


class Program:
    """One call for arrays of given shapes: its result, and its gradient from what the call kept.

    Attributes:
      results: shape and type of each array that `run` returns: the result, then the residuals.
      gradients: shape and type of each array that `pull` returns.
      needed: the numbers of those among [arrays, results] that `pull` reads.
    """

    def __init__(self, call: Call, device: str, shapes: Sequence[Shape]):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        self.gradients = [arrays[number] for number in call.wrt]
        self.needed: tuple[int, ...] = ()
        self._call, self._device = call, default_device(device)
        self._wide = any(dtype in ("float64", "int64", "complex128") for _, dtype in shapes)
        self._leaves: list[tuple[int | None, Any]] = []
        self._run, self._pull = jax.jit(self._forward), jax.jit(self._backward)
        with self._precision(), jax.default_device(self._device):
            self.results: list[jax.ShapeDtypeStruct] = jax.eval_shape(self._run, *arrays)

    def run(self, tensors: Sequence[Any]) -> list[Array]:
        """Returns the result, then the residuals; the arrays share the memory of the tensors."""
        return self._compute(self._run, tensors)

    def pull(self, tensors: Sequence[Any]) -> list[Array]:
        """Returns the gradients of the arrays of `wrt`.

        The tensors are those that `needed` names, then the gradient of the result.
        """
        return self._compute(self._pull, tensors)

    def _compute(self, function: Callable[..., list[Array]], tensors: Sequence[Any]) -> list[Array]:
        """Starts the computation. `torch.from_dlpack` waits for the results on a CPU; on a GPU it
        lets the stream of PyTorch wait.
        """
        with self._precision():
            arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
            with jax.default_device(self._device):
                return function(*arrays)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Lets JAX have float64, where a tensor has it, and name int64 in errors."""
        return jax.enable_x64(True) if self._wide else contextlib.nullcontext()

    def _forward(self, *arrays: Array) -> list[Array]:
        def of_wrt(*chosen: Array) -> Array:
            replaced = dict(zip(self._call.wrt, chosen, strict=True))
            return _evaluate(self._call, [replaced.get(i, x) for i, x in enumerate(arrays)])

        out, pull = jax.vjp(of_wrt, *(arrays[number] for number in self._call.wrt))
        values = [*arrays, out]
        numbers = {id(value): number for number, value in enumerate(values)}
        leaves, self._tree = jax.tree.flatten(pull)
        kept: list[tuple[int | None, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, jax.core.Tracer):
                kept.append((None, leaf))
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(values)
                values.append(leaf)
            kept.append((numbers[id(leaf)], None))
        self._leaves = kept
        self.needed = tuple(dict.fromkeys(n for n, _ in kept if n is not None))
        return values[len(arrays) :]

    def _backward(self, *arrays: Array) -> list[Array]:
        *values, cotangent = arrays
        given = dict(zip(self.needed, values, strict=True))
        leaves = [leaf if number is None else given[number] for number, leaf in self._leaves]
        return list(jax.tree.unflatten(self._tree, leaves)(cotangent))


def default_device(device: str) -> jax.Device:
    """Returns the first device of JAX for a type of PyTorch's devices.

    Raises:
      ConfigError: JAX has no such device.
    """
    if device not in PLATFORMS:
        raise ConfigError(
            f"the tensors are on {device}, but cope_jax.torch runs on {' and '.join(PLATFORMS)}: move them"
        )
    try:
        return jax.local_devices(backend=PLATFORMS[device])[0]
    except RuntimeError:
        raise ConfigError(
            f"the tensors are on {device}, but JAX has only {jax.default_backend()}: pip install 'cope-jax[cuda]', "
            "or move the tensors to the CPU"
        ) from None


def program(key: str) -> Program:
    """Returns a program from the JSON of (the JSON of `Call`, the type of device, shapes)."""
    call, device, shapes = json.loads(key)
    return Program(Call(*json.loads(call)), device, shapes)


class Facts(NamedTuple):
    """Facts of an encoding that a model must know.

    Attributes:
      embeds_input: whether it acts on the input embeddings.
      reads_x: whether it reads the input of the layer.
      changes: whether it changes attention while its parameters are the initial ones.
      reads_queries: whether a row of the logits depends on earlier queries.
      reads_hidden: whether tokens that only a mask of four axes hides change the result.
      remembers: whether tokens outside the window change the result.
      absolute: whether the result changes when all positions move.
    """

    embeds_input: bool
    reads_x: bool
    changes: bool
    reads_queries: bool
    reads_hidden: bool
    remembers: bool
    absolute: bool


def create(encoding: str, seed: int) -> encodings.Encoding:
    """Creates an encoding from its JSON."""
    pairs, sizes = json.loads(encoding)
    config = encodings.EncodingConfig(tuple(map(tuple, pairs)))
    composed = config.build(encodings.AttentionShape(**sizes), rngs=nnx.Rngs(seed))
    return composed if len(pairs) > 1 else composed.parts[pairs[0][0]]


def initial_parameters(encoding: str, seed: int) -> dict[str, np.ndarray]:
    """Returns the initial parameters of an encoding by their paths, joined by dots."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        state = nnx.to_flat_state(nnx.state(create(encoding, seed)))
        return {".".join(map(str, path)): np.array(value[...]) for path, value in state}


@functools.lru_cache(256)
def check_positions(encoding: str, low: int, high: int) -> None:
    """Raises ConfigError if the hook `embed` of an encoding has no such positions."""

    def embed() -> Array:
        created = create(encoding, 0)
        x = jnp.zeros((1, 2, created.shape.width), jnp.float32)
        positions: Any = np.array([[low, high]], np.int32)  # known while tracing
        return created.embed(x, positions)

    jax.eval_shape(embed)


@functools.cache
def facts(encoding: str, crops: bool) -> Facts:
    """Returns the facts of an encoding, found out with a few random tokens.

    `crops` says whether a cache may keep a window only; without it `remembers` and `absolute` are
    not computed.
    """
    created = create(encoding, 0)
    shape, tokens, window = created.shape, 24, 6
    normal = np.random.default_rng(0).standard_normal
    x, q, k, v = (
        jnp.asarray(normal((1, tokens, *size)), jnp.float32)
        for size in (
            (shape.width,),
            (shape.num_heads, shape.head_dim),
            *[(shape.kv_heads, shape.head_dim)] * 2,
        )
    )

    def result(encoding: encodings.Encoding, x: Any, **options: Any) -> Array:
        return attend(q, k, v, encoding=encoding, x=x, embedded=True, **options)

    def cropped(first: int) -> Array:
        """The result of the last query from the keys of its window alone."""
        positions = first + jnp.arange(window, dtype=jnp.int32)[None]
        return attend(
            q[:, -1:],
            k[:, -window:],
            v[:, -window:],
            encoding=created,
            embedded=True,
            q_positions=positions[:, -1:],
            k_positions=positions,
        )

    def apart() -> tuple[Array, Array]:
        """The results of the last tokens: with a mask that hides the others, and alone."""
        seen = np.tril(np.ones((1, 1, tokens, tokens), bool))
        seen[..., -window:, :-window] = False
        last = [array[:, -window:] for array in (q, k, v, x)]
        alone = attend(*last[:3], encoding=created, x=last[3], embedded=True)
        return result(created, x, mask=seen, causal=False)[:, -window:], alone

    def differ(a: Array, b: Array, atol: float) -> bool:
        return not np.allclose(a, b, rtol=0, atol=atol)

    plain = encodings.Encoding(encodings.Encoding.Config(), shape, rngs=nnx.Rngs(0))
    try:
        jax.eval_shape(lambda: result(created, None))
        reads_x = False
    except ConfigError:
        reads_x = True
    reads_queries = not created.traits.splits_queries
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        changes = differ(result(created, x), result(plain, x), 1e-5)
        state = nnx.state(created)
        nnx.update(created, jax.tree.map(lambda y: jnp.asarray(normal(y.shape), y.dtype), state))
        reads_hidden = remembers = absolute = False
        with contextlib.suppress(ConfigError):  # without a mask: its calls raise this too
            masked, alone = apart()
            reads_hidden = differ(masked, alone, 1e-3)
        if crops and not reads_x and not reads_queries:
            last = cropped(tokens - window)
            remembers = differ(result(created, x, window=window)[:, -1:], last, 1e-3)
            absolute = differ(cropped(8192), last, 1e-2)  # float32 rounds angles of 8192
    return Facts(
        *(created.traits.embeds_input, reads_x, changes, reads_queries),
        *(reads_hidden, remembers, absolute),
    )


def _evaluate(call: Call, arrays: Sequence[Array]) -> Array:
    """Calls the hook with the arrays and the options."""
    given: dict[str, Any] = dict(zip(call.names, arrays, strict=True))
    params = {name: given.pop(name) for name in call.names if name.startswith(PARAMETER)}
    graph, state = _structure(call.encoding)
    leaves = [
        (path, variable.replace(params[PARAMETER + ".".join(map(str, path))]))
        for path, variable in nnx.to_flat_state(state)
    ]
    encoding = nnx.merge(graph, nnx.from_flat_state(leaves))
    if call.hook == "embed":
        return encoding.embed(**given)
    if "dropout_key" in given:
        given["dropout_key"] = jax.lax.bitcast_convert_type(given["dropout_key"], jnp.uint32)
    return attend(**given, encoding=encoding, **call.options)


@functools.cache
def _structure(encoding: str) -> tuple[Any, PyTree]:
    """Returns the graph and the abstract state of an encoding."""
    return nnx.split(nnx.eval_shape(lambda: create(encoding, 0)))
