"""The work that is timed: an attention problem with random arrays, and a training recipe with a
batch.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax import tasks
from cope_jax.array_types import PyTree
from cope_jax.cli.flag_values import read_numbers
from cope_jax.encodings import AttentionShape, Encoding, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from tools.timing import LeftOut

FORWARD, BACKWARD, TANGENT, STEP = "forward", "forward+backward", "jvp", "step"
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Causal self-attention of L tokens."""

    length: int  # L
    npos_max: int = 64  # N, the number of rows of CoPE's table
    batch: int = 1  # B
    heads: int = 8  # H
    head_dim: int = 64  # K
    dtype: str = "float32"  # type of queries, keys and values; or "bfloat16"
    devices: int = 1  # number of JAX devices over which JAX contenders split the work
    jvp: bool = False  # whether JAX contenders also compute the tangent of the output

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("length", "batch", "heads", "head_dim")}
        check_at_least(1, "benchmark", **sizes)
        check_at_least(2, "benchmark", npos_max=self.npos_max)
        if self.head_dim % 2:
            raise ConfigError(
                f"benchmark.head_dim must be even, because RoPE rotates pairs, got {self.head_dim}"
            )
        if self.heads % self.devices:
            raise ConfigError(
                f"{self.devices} devices cannot share {self.heads} heads: choose other --devices"
            )

    def arrays(self) -> list[np.ndarray]:
        """q, k, v and the cotangent of the output, `[B, L, H, K]`, standard normal, float32.

        Gates are then about ½ and vary, as in a model before training.
        """
        rng = np.random.default_rng(0)
        size = (self.batch, self.length, self.heads, self.head_dim)
        return [rng.standard_normal(size, np.float32) for _ in range(4)]

    def parameter(self, shape: tuple[int, ...]) -> np.ndarray:
        """Noise to add to an initial parameter, as if it were trained; always the same for one
        shape.
        """
        return 0.1 * np.random.default_rng(1).standard_normal(shape, np.float32)

    def encoding(self, spec: str) -> tuple[Callable[[PyTree], Encoding], PyTree]:
        """An encoding as a function of its parameters, and these parameters: the initial values
        plus `parameter`.
        """
        config = EncodingConfig.parse(spec, {"cope": {"npos_max": self.npos_max}})
        shape = AttentionShape(self.heads, self.head_dim, max_length=self.length)
        parts: Any = nnx.split(config.build(shape, rngs=nnx.Rngs(0)), nnx.Param, ...)
        graph, initial, rest = parts

        def trained(leaf: jax.Array) -> jax.Array:
            return leaf + jnp.asarray(self.parameter(leaf.shape), leaf.dtype)

        return lambda params: nnx.merge(graph, params, rest), jax.tree.map(trained, initial)

    def check_square(self, matrices: int) -> None:
        """Raises LeftOut if this number of matrices of all pairs of tokens would take over half of
        the free memory.
        """
        needed, free = 4.0 * matrices * self.batch * self.heads * self.length**2, free_memory()
        if needed > free / 2:
            raise LeftOut(
                f"matrices of all pairs of tokens would take about {needed / 2**30:.1f} GiB, over half "
                f"of the {free / 2**30:.1f} GiB of free memory: choose shorter lengths"
            )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The name of a file of cope_jax/configs, and its config with the batch size of the benchmark."""

    name: str
    config: ExperimentConfig

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Reads NAME, or NAME@BATCH, which sets the batch size.

        >>> Recipe.parse("counting:3@8").config.training.batch_size
        8
        """
        name, at, batch = text.partition("@")
        config = config_files.config(name)
        if at:
            if not batch.isdecimal() or int(batch) < 1:
                raise ConfigError(
                    f"--recipes={text}: write NAME@BATCH with a batch size of at least 1"
                )
            training = dataclasses.replace(config.training, batch_size=int(batch), examples=None)
            config = dataclasses.replace(config, training=training)
        return cls(name, config)

    @property
    def label(self) -> str:
        return f"{self.name}, batch {self.config.training.batch_size}"

    def batch(self) -> Mapping[str, np.ndarray]:
        """One batch of training data."""
        task = tasks.create(self.config.task.name, **self.config.task.options)
        return task.sample(np.random.default_rng(0), self.config.training.batch_size, "train")


def read_problems(
    flag: str, lengths: Sequence[str], npos_max: Sequence[str], *sizes: Any
) -> list[Problem]:
    """Reads the problems of a flag: each length with each size of CoPE's table. A size of T means
    the length.

    >>> [problem.npos_max for problem in read_problems("lengths", ["8", "16"], ["4", "T"])]
    [4, 8, 4, 16]
    """
    problems = []
    for length in read_numbers(flag, lengths or [""]):
        rows = read_numbers("npos_max", [str(length) if n == "T" else n for n in npos_max])
        problems += [Problem(length, n, *sizes) for n in dict.fromkeys(rows)]
    return problems


def free_memory() -> float:
    """The number of bytes that new arrays may take; infinite if the system does not report it.

    Memory of this process counts as free, because an allocator that keeps its blocks gives them to
    the next array.
    """
    kibibytes = 0
    for path, name in (("/proc/meminfo", "MemAvailable"), ("/proc/self/status", "VmRSS")):
        try:
            lines = Path(path).read_text().splitlines()
            kibibytes += next(int(line.split()[1]) for line in lines if line.startswith(name))
        except (OSError, StopIteration):
            return math.inf
    return 1024.0 * kibibytes


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
