import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 527093841  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "dense", "sparse", "steps=7"])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_what_counts_is_an_object_that_was_seen_at_the_same_cell(dimensions, split):
    """By the steps alone, one after the other."""
    task = tasks.create("navigation", dimensions=dimensions, steps=24, side=6, objects=5)
    steps = int(task.level(split))
    side = round(6 * steps / 24)
    batch = task.sample(np.random.default_rng(0), 32, split)
    counted = 0
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        words = [*task.decode(inputs).split(), task.decode(targets[-1:])]
        cell, seen = [0] * dimensions, {}
        for step in range(steps):
            action, item = words[2 * step : 2 * step + 2]
            axis = "xyz".index(action[1])
            cell[axis] = (cell[axis] + (1 if action[0] == "+" else -1)) % side
            known = seen.get(tuple(cell))
            assert known in (None, item)
            assert weights[2 * step] == (known is not None and item != "_")
            assert step == 0 or weights[2 * step - 1] == 0
            seen[tuple(cell)] = item
            counted += weights[2 * step]
    assert counted > 0


def test_in_training_every_token_counts():
    batch = tasks.create("navigation").sample(np.random.default_rng(0), 4)
    assert (batch["weights"] == 1).all()


def test_splits_are_those_of_the_paper():
    task = tasks.create("navigation")
    assert {split: task.length(split) for split in task.splits} == {
        "train": 255,
        "in_distribution": 255,
        "dense": 127,
        "sparse": 511,
    }
    for split, p_empty in (("in_distribution", 0.5), ("dense", 0.2), ("sparse", 0.8)):
        batch = task.sample(np.random.default_rng(0), 1000, split)
        share = np.mean(batch["inputs"][:, 1::2] == task.vocab_size - 1)
        assert abs(share - p_empty) < 0.02


@pytest.mark.parametrize(("dimensions", "longest"), [(1, 10), (2, 3)])
def test_runs_have_any_length_up_to_the_longest(dimensions, longest):
    """The next run has the same direction with 1 in 2·dimensions, and adds to the run before."""
    task = tasks.create("navigation", dimensions=dimensions, steps=400)
    actions = task.sample(np.random.default_rng(0), 300, "in_distribution")["inputs"][:, ::2]
    first = np.argmax(actions != actions[:, :1], axis=1)
    mean = (1 + longest) / 2 * 2 * dimensions / (2 * dimensions - 1)
    assert abs(first.mean() - mean) < 0.25 * mean
    assert (
        np.abs(
            np.bincount(actions[:, 0], minlength=2 * dimensions) / 300 - 1 / (2 * dimensions)
        ).max()
        < 0.15
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 7}, "at most 6, got 7"),
        ({"steps": 1}, "steps must be at least 2"),
        ({"p_empty": 1.5}, "between 0 and 1"),
        ({"dimensions": 3}, "lower side or dimensions"),
    ],
)
def test_mistakes_are_loud(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("navigation", **options)
