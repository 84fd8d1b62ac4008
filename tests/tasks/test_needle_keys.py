import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 174187868  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
def test_the_answer_follows_from_the_text(split):
    for question, answer in questions(tasks.create("needle_keys"), split):
        text, key = "".join(question).split("?")
        needles = {
            needle[0]: needle[2:6]
            for needle in text.split("_")
            if needle
            for needle in _each(needle)
        }
        assert len(needles) == 4
        assert "".join(answer) == needles[key]


def _each(text):
    """Needles that stand side by side."""
    assert len(text) % 6 == 0
    return [text[n : n + 6] for n in range(0, len(text), 6)]


def test_sizes_and_places():
    task = tasks.create("needle_keys")
    haystack = lambda question: question.index("?")  # noqa: E731
    assert sizes(task, "train", haystack, 1000) == (24, 64)
    assert sizes(task, "longer", haystack, 1000) == (65, 128)
    places = [
        question.index(question[-1]) / question.index("?")
        for question, _ in questions(task, "longer", 400)
    ]
    assert abs(np.mean(places) - 0.45) < 0.1


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="at least 36, all needles, got 30"):
        tasks.create("needle_keys", tokens=30, keys=6)
