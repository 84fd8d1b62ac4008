"""One attention problem: its sizes, and the same random arrays for every contender."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cope_jax.encodings import AttentionShape
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from experiments.benchmarks.case import LeftOut


@dataclasses.dataclass(frozen=True)
class Problem:
    """Causal self-attention of L tokens.

    Attributes:
      length: L.
      npos_max: N, rows of CoPE's table.
      batch: B.
      heads: H.
      head_dim: K.
      dtype: of queries, keys and values, "float32" or "bfloat16".
      devices: of JAX, over which its contenders split the work.
    """

    length: int
    npos_max: int = 64
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    devices: int = 1

    def __post_init__(self):
        check_at_least(1, "benchmark", length=self.length, batch=self.batch, heads=self.heads, head_dim=self.head_dim)
        check_at_least(2, "benchmark", npos_max=self.npos_max)
        if self.head_dim % 2:
            raise ConfigError(f"benchmark.head_dim must be even, for RoPE turns pairs, got {self.head_dim}")

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.head_dim, max_length=self.length)

    def arrays(self) -> list[np.ndarray]:
        """q, k, v and the cotangent of the output, `[B, L, H, K]`, standard normal, float32.

        Gates are then about ½ and vary, as those of a model before training do.
        """
        rng = np.random.default_rng(0)
        size = (self.batch, self.length, self.heads, self.head_dim)
        return [rng.standard_normal(size, np.float32) for _ in range(4)]

    def parameter(self, shape: tuple[int, ...]) -> np.ndarray:
        """What is added to an initial parameter, as training would; always the same for one shape."""
        return 0.1 * np.random.default_rng(1).standard_normal(shape, np.float32)

    def trained(self, leaf: Any) -> Any:
        """An initial parameter with `parameter` added."""
        return leaf + jnp.asarray(self.parameter(leaf.shape), leaf.dtype)

    def check_square(self, matrices: int) -> None:
        """Raises LeftOut if that many matrices of all pairs would take more than half of the memory that is free."""
        needed = 4 * matrices * self.batch * self.heads * self.length**2
        free = free_memory()
        if needed > free / 2:
            raise LeftOut(
                f"holds the pairs of all tokens, about {gibibytes(needed)} GiB, and {gibibytes(free)} GiB are free"
            )

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def free_memory() -> float:
    """Bytes that new arrays may take; infinite where the system does not say.

    What this process holds counts as free: an allocator that keeps its blocks gives them to the next array.
    """
    kibibytes = 0
    for path, name in (("/proc/meminfo", "MemAvailable"), ("/proc/self/status", "VmRSS")):
        try:
            lines = Path(path).read_text().splitlines()
            kibibytes += next(int(line.split()[1]) for line in lines if line.startswith(name))
        except (OSError, StopIteration):
            return math.inf
    return 1024.0 * kibibytes


def gibibytes(count: float) -> str:
    """Bytes in GiB, as text.

    >>> gibibytes(3.25 * 2**30)
    '3.2'
    """
    return f"{count / 2**30:.1f}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
