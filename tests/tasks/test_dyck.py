import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 1416569643  # of the data, see test_every_task.py

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(("split", "depth"), [("in_distribution", 4), ("longer", 8), ("longest", 16)])
def test_the_answer_closes_everything(split, depth):
    task = tasks.create("dyck")
    deepest = 0
    for question, answer in questions(task, split, 200):
        text = "".join(question + answer)
        while "()" in text or "[]" in text:
            text = text.replace("()", "").replace("[]", "")
        assert text == ""
        assert set(answer) <= {")", "]"}
        heights = np.cumsum([1 if symbol in "([" else -1 for symbol in question])
        assert heights[-1] == len(answer) > 0
        deepest = max(deepest, heights.max())
    assert deepest == depth


def test_kinds_are_uniform():
    symbols = [symbol for question, _ in questions(tasks.create("dyck"), "train", 400) for symbol in question]
    assert abs(symbols.count("(") / (symbols.count("(") + symbols.count("[")) - 0.5) < 0.03


def test_sizes():
    assert sizes(tasks.create("dyck"), "train", len) == (1, 32)
    assert sizes(tasks.create("dyck"), "longer", len, 1000) == (33, 64)


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="at least 8, twice the depth, got 6"):
        tasks.create("dyck", length=6)
