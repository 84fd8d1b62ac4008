"""Dyck-2: which brackets may come next in a well-formed sequence of two kinds.

MapFormer, arXiv:2511.19279, appendix B.4.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, check, next_token_batch

OPEN, CLOSE = "([", ")]"


@TASKS.register("dyck")
class Dyck(SyntheticTask):
    """A closed sequence of brackets, of length L and with the largest depth D; all tokens count.

    The sequences are uniform among all paths of brackets from depth 0 to depth 0 that reach D but
    not more; the kind of each pair is uniform. D grows with L: it is `depth` at the training length
    and twice that in "longer".

    Any valid bracket may follow, so the headline metric is not the token error but `f1_error` = 1 −
    F1. F1 is the harmonic mean of 1 − `invalid_error` and 1 − `valid_error`: the probability of all
    valid brackets, and the share of valid brackets that are more probable than all invalid ones
    together; the first is a mean over all places, the second over all valid brackets of all places.
    Both brackets that open are always valid, even at depth D, and so is the one that closes the
    last open bracket.

    A batch has one more field, `valid`, float32 `[n, L, V]`: 1 for each token that may come next.

    >>> task = Dyck(Dyck.Config(length=8, depth=3))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    '[ [ [ ] ] ] ['
    >>> [task.decode(np.flatnonzero(valid)) for valid in batch["valid"][0]]
    ['( [ ]', '( [ ]', '( [ ]', '( [ ]', '( [ ]', '( [', '( [ ]']
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of Dyck-2.

        Attributes:
          length: the number of brackets in "train" and "in_distribution"; "longer" has twice as
            many, "longest" four times.
          depth: the largest depth at this length.
        """

        length: int = 32
        depth: int = 4

        def __post_init__(self):
            check_at_least(2, "dyck", depth=self.depth)
            check(
                self.length >= 2 * self.depth and self.length % 2 == 0,
                f"dyck.length must be even and at least {2 * self.depth}, twice the depth, got {self.length}",
            )

    abilities = ("stack",)
    axis = "length"
    sweep_label = "number of brackets"
    metric = "f1_error"
    other_metrics = ("invalid_error", "valid_error")

    def __init__(self, config: Config):
        n = config.length
        super().__init__(
            config,
            vocabulary=OPEN + CLOSE,
            levels={"train": n, "in_distribution": n, "longer": 2 * n, "longest": 4 * n},
            sweep=[(length, length) for length in (n, 2 * n, 3 * n, 4 * n)],
        )

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        valid, above = 1 - metrics["invalid_error"], 1 - metrics["valid_error"]
        f1 = 2 * valid * above / (valid + above) if valid + above else 0.0
        return {**metrics, "f1_error": 1 - f1}

    def _length(self, level: float) -> int:
        return int(level) - 1  # the first bracket is not predicted

    def _valid(self, level: float) -> bool:
        return level >= 4 and level % 2 == 0

    def _depth(self, length: int) -> int:
        """The largest depth of a sequence of `length` brackets."""
        return min(max(2, round(self.config.depth * length / self.config.length)), length // 2)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        length = int(level)
        opens_NL = self._opens(rng, n, length)
        kinds_NL = rng.integers(2, size=(n, length))
        tokens_NL, closing_NL = np.zeros((2, n, length), np.int32)
        stack_ND = np.zeros((n, length), np.int32)
        depth_N = np.zeros(n, np.int32)
        rows = np.arange(n)
        for position in range(length):
            opens_N = opens_NL[:, position]
            depth_N += opens_N
            stack_ND[rows[opens_N], depth_N[opens_N] - 1] = kinds_NL[opens_N, position]
            top_N = stack_ND[rows, depth_N - 1]
            tokens_NL[:, position] = top_N + len(OPEN) * ~opens_N
            depth_N -= ~opens_N
            closing_N = len(OPEN) + stack_ND[rows, depth_N - 1]
            closing_NL[:, position] = np.where(depth_N > 0, closing_N, 0)
        batch = next_token_batch(tokens_NL, np.ones((n, length - 1)))
        valid_NLV = np.eye(len(OPEN + CLOSE), dtype=np.float32)[closing_NL[:, :-1]]
        valid_NLV[..., : len(OPEN)] = 1
        return {**batch, "valid": valid_NLV}

    def _opens(self, rng: np.random.Generator, n: int, length: int) -> np.ndarray:
        """True for brackets that open, of n sequences, uniform among all of the largest depth."""
        deepest = self._depth(length)
        # paths_RDL[reached, depth, left]: how many paths with `left` steps left end as they must,
        # in a unit for each `left`, a power of two, because the numbers themselves overflow.
        paths_RDL = np.zeros((2, deepest + 2, length + 1))  # the last depth is forbidden
        paths_RDL[1, 0, 0] = 1
        for left in range(1, length + 1):
            for reached in range(2):
                for depth in range(deepest + 1):
                    up = paths_RDL[reached or int(depth + 1 == deepest), depth + 1, left - 1]
                    down = paths_RDL[reached, depth - 1, left - 1] if depth else 0.0
                    paths_RDL[reached, depth, left] = up + down
            paths_RDL[..., left] /= np.exp2(np.frexp(paths_RDL[..., left].max())[1])
        opens_NL = np.zeros((n, length), bool)
        depth_N, reached_N = np.zeros((2, n), np.int32)
        for position in range(length):
            left = length - position - 1
            up_N = paths_RDL[reached_N | (depth_N + 1 == deepest), depth_N + 1, left]
            down_N = np.where(depth_N > 0, paths_RDL[reached_N, depth_N - 1, left], 0)
            opens_NL[:, position] = rng.random(n) * (up_N + down_N) < up_N
            depth_N += np.where(opens_NL[:, position], 1, -1)
            reached_N |= depth_N == deepest
        return opens_NL
