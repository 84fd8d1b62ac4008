"""Navigation: predict what is seen at a place that was seen before, from the steps since then.

MapFormer, arXiv:2511.19279, appendix B.3.
"""

import dataclasses
import math

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, check, next_token_batch

AXES = "xyzuvw"


@TASKS.register("navigation")
class Navigation(SyntheticTask):
    """A walk on a torus whose cells have an object or nothing; steps and objects alternate.

    The walk repeats: choose one of the 2·`dimensions` directions, and go 1 to `max_run` steps. The
    objects are uniform and new in each sequence. To know where it is, a model must
    add up steps, which can cancel.

    In training all tokens count. In evaluation only objects count, and only at cells that were seen
    before: the paper counts the cells that were seen before; its accuracies fit objects alone,
    because blanks are easy to guess.

    The level is the number n of steps. The side of the torus is `side`·n/`steps`, and a cell is
    empty with probability `p_empty` + 0.3·log2(n/`steps`): with the defaults 0.2 for "dense", which
    has half of the steps, and 0.8 for "sparse", which has twice as many, as in the paper. So a walk
    that goes around the torus comes back after another number of steps than in training; with
    `side` ≥ `steps` no walk goes around it.

    >>> task = Navigation(Navigation.Config(steps=6, side=4, objects=3))
    >>> batch = task.sample(np.random.default_rng(0), 1, "in_distribution")
    >>> task.decode(batch["inputs"][0])
    '-x 2 -x 1 -x 1 -x _ +x 1 +x'
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '1 1'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of navigation.

        Attributes:
          dimensions: the number of axes of the torus.
          steps: the number of steps in "train" and "in_distribution".
          side: the number of cells along each axis in these splits.
          max_run: the most steps in one direction. If None, 10 in one dimension and 3 in several.
          objects: the number of different objects.
          p_empty: the probability that a cell is empty in these splits.
        """

        dimensions: int = 1
        steps: int = 128
        side: int = 64
        max_run: int | None = None
        objects: int = 16
        p_empty: float = 0.5

        def __post_init__(self):
            sizes = {
                "dimensions": self.dimensions,
                "max_run": self.max_run,
                "objects": self.objects,
            }
            check_at_least(1, "navigation", **sizes)
            check_at_least(2, "navigation", steps=self.steps, side=self.side)
            check(
                self.dimensions <= len(AXES),
                f"navigation.dimensions must be at most 6, got {self.dimensions}",
            )
            check(
                0 <= self.p_empty <= 1,
                f"navigation.p_empty must lie between 0 and 1, got {self.p_empty}",
            )
            cells = (2 * self.side) ** self.dimensions
            check(
                cells <= 2**20,
                f"navigation has {cells} cells in 'sparse', more than 2**20: lower side or dimensions",
            )

    abilities = ("steps",)
    axis = "steps"
    sweep_label = "steps"

    def __init__(self, config: Config):
        steps, axes = config.steps, AXES[: config.dimensions]
        self._run = config.max_run or (10 if config.dimensions == 1 else 3)
        levels = {"train": steps, "in_distribution": steps}
        levels |= {"dense": max(2, steps // 2), "sparse": 2 * steps}
        points = {levels["dense"], (levels["dense"] + steps) // 2, steps, 3 * steps // 2, 2 * steps}
        super().__init__(
            config,
            vocabulary=(
                *(f"{sign}{axis}" for axis in axes for sign in "+-"),
                *map(str, range(config.objects)),
                "_",
            ),
            levels=levels,
            sweep=[(point, point) for point in sorted(points)],
        )

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        batch = super().sample(rng, n, split)
        return {**batch, "weights": np.ones_like(batch["weights"])} if split == "train" else batch

    def _length(self, level: float) -> int:
        return 2 * int(level) - 1

    def _valid(self, level: float) -> bool:
        return level >= 2 and level == int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        config, steps = self.config, int(level)
        side = max(2, round(config.side * steps / config.steps))
        p_empty = min(max(config.p_empty + 0.3 * math.log2(steps / config.steps), 0.0), 1.0)
        actions = self._walk(rng, n, steps)
        moves = np.zeros((n, steps, config.dimensions), np.int64)
        np.put_along_axis(moves, actions[..., None] // 2, 1 - 2 * (actions[..., None] % 2), axis=2)
        start = rng.integers(side, size=(n, 1, config.dimensions))
        places = (start + np.cumsum(moves, axis=1)) % side
        cells = (places * side ** np.arange(config.dimensions)).sum(axis=2)
        empty = 2 * config.dimensions + config.objects
        world = rng.integers(2 * config.dimensions, empty, size=(n, side**config.dimensions))
        world[rng.random(world.shape) < p_empty] = empty
        seen = np.take_along_axis(world, cells, axis=1)
        before = np.tril(cells[:, :, None] == cells[:, None, :], k=-1).any(axis=2)
        tokens = np.stack([actions, seen], axis=2).reshape(n, 2 * steps)
        counts = np.stack([np.zeros_like(before), before & (seen < empty)], axis=2)
        weights = counts.reshape(n, 2 * steps)
        return next_token_batch(tokens, weights[:, 1:])

    def _walk(self, rng: np.random.Generator, n: int, steps: int) -> np.ndarray:
        """The direction of each step, `[n, steps]`."""
        directions = rng.integers(2 * self.config.dimensions, size=(n, steps))
        ends = np.cumsum(rng.integers(1, self._run + 1, size=(n, steps)), axis=1)  # of each run
        run = (np.arange(steps)[None, :, None] >= ends[:, None, :]).sum(axis=2)
        return np.take_along_axis(directions, run, axis=1)
