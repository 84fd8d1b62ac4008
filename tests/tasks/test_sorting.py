import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 484215491  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
def test_single_symbols(split):
    order = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
    for question, answer in questions(tasks.create("sorting"), split):
        assert len(set(question)) == len(question)
        assert answer == sorted(question, key=order.index)


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
def test_numbers(split):
    for question, answer in questions(tasks.create("sorting", form="multi_digit", items=8), split):
        items, ordered = ("".join(text).rstrip(",").split(",") for text in (question, answer))
        assert ordered == sorted(items, key=int)
        assert len(set(items)) == len(items)
        assert all(10 <= int(item) <= 9999 for item in items)


def test_sizes():
    assert sizes(tasks.create("sorting"), "train", len) == (1, 16)
    assert sizes(tasks.create("sorting"), "longer", len, 500) == (17, 32)


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="at most 25"):
        tasks.create("sorting", items=26)
    with pytest.raises(ConfigError, match="at most 4995, because there are 9,990 different items"):
        tasks.create("sorting", form="multi_digit", items=4996)
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("sorting").level("items=51")
