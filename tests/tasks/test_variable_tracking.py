import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 4024880955  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
@pytest.mark.parametrize("chains", [1, 3])
def test_the_answer_follows_from_the_text(chains, split):
    task = tasks.create("variable_tracking", chains=chains, hops=3)
    for question, answer in questions(task, split):
        text, value = "".join(question).split("?")
        holds, names = {}, []
        for line in text.replace("_", "").rstrip(";").split(";"):
            name, source = line.split(":")
            assert name not in holds
            holds[name] = holds.get(source, source)
            names += [name] if holds[name] == value else []
        assert answer == names
        assert len(names) == 4
        assert len(holds) == 4 * chains


def test_sizes_and_places():
    task = tasks.create("variable_tracking", chains=1)
    haystack = lambda question: question.index("?")  # noqa: E731
    assert sizes(task, "train", haystack, 1000) == (20, 64)
    assert sizes(task, "longer", haystack, 1000) == (65, 128)
    begins = [question[0] == "_" for question, _ in questions(task, "longer", 200)]
    assert 0.5 < np.mean(begins) < 1


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="at least 40, four for each assignment"):
        tasks.create("variable_tracking", tokens=30)
    with pytest.raises(ConfigError, match="30 variables, more than 26"):
        tasks.create("variable_tracking", chains=6)
