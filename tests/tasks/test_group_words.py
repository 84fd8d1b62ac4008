import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 2337390216  # of the data, see test_every_task.py


ORDERS = {"S2": 2, "A3": 3, "S3": 6, "Z60": 60, "A4xZ5": 60, "A5": 60, "S5": 120}


def permutation(text):
    return [int(image) for image in (text.split(".") if "." in text else text)]


@pytest.mark.parametrize("split", ["train", "longest"])
@pytest.mark.parametrize("group", ORDERS)
def test_targets_are_the_products_so_far(group, split):
    task = tasks.create("group_words", group=group, length=8)
    assert task.vocab_size == ORDERS[group]
    batch = task.sample(np.random.default_rng(0), 8, split)
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        product = sorted(permutation(task.vocabulary[0]))
        for word, target in zip(inputs, targets, strict=True):
            factor = permutation(task.vocabulary[word])
            product = [factor[image] for image in product]
            assert permutation(task.vocabulary[target]) == product
    assert batch["weights"].all()


@pytest.mark.parametrize(
    ("group", "commutes"),
    [("S2", True), ("A3", True), ("Z60", True), ("A5", False), ("A4xZ5", False)],
)
def test_which_groups_commute(group, commutes):
    product = tasks.create("group_words", group=group)._product
    assert (product == product.T).all() == commutes


def test_swaps_only():
    task = tasks.create("group_words", group="S5", swaps_only=True)
    batch = task.sample(np.random.default_rng(0), 64)
    used = {task.vocabulary[word] for word in np.unique(batch["inputs"])}
    assert len(used) == 11
    assert all(
        sum(int(image) != element for element, image in enumerate(word)) in (0, 2) for word in used
    )
    assert len(np.unique(batch["targets"])) == 120


def test_parity_is_the_smallest_group():
    batch = tasks.create("group_words", group="S2").sample(np.random.default_rng(0), 16)
    np.testing.assert_array_equal(batch["targets"], np.cumsum(batch["inputs"], axis=1) % 2)


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="A5 has no swaps"):
        tasks.create("group_words", swaps_only=True)
