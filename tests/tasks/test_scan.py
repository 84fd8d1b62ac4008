import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.tasks.scan import commands
from tests.tasks.reading import questions, sizes

CHECKSUM = 358374298  # of the data, see test_every_task.py


def interpret(words):
    """The published interpretation, from the last word backwards."""
    for joint in ("and", "after"):
        if joint in words:
            left, right = words[: words.index(joint)], words[words.index(joint) + 1 :]
            first, second = (left, right) if joint == "and" else (right, left)
            return interpret(first) + interpret(second)
    if words[-1] in ("twice", "thrice"):
        return interpret(words[:-1]) * (2 if words[-1] == "twice" else 3)
    verb = [] if words[0] == "turn" else [words[0].upper()]
    if len(words) == 1:
        return verb
    turn = [words[-1].upper()]
    return {"opposite": turn * 2 + verb, "around": (turn + verb) * 4}.get(words[1], turn + verb)


def test_every_command():
    assert len({words for words, _ in commands()}) == 20_910
    for words, actions in commands()[::7]:
        assert interpret(words.split()) == actions.split()


def test_the_published_split_by_length():
    assert sum(len(actions.split()) <= 22 for _, actions in commands()) == 16_990


@pytest.mark.parametrize(
    ("split", "least", "most"), [("in_distribution", 1, 22), ("longer", 23, 48)]
)
def test_what_a_split_has(split, least, most):
    task = tasks.create("scan")
    lengths = set()
    for question, answer in questions(task, split, 300):
        assert interpret(question) == answer
        lengths.add(len(answer))
    assert least <= min(lengths)
    assert max(lengths) <= most
    assert len(lengths) > 8


@pytest.mark.parametrize("actions", [1, 22, 36, 41, 46, 47])
def test_every_point_of_the_sweep_has_commands(actions):
    task = tasks.create("scan", actions=actions)
    for _, split in task.sweep:
        assert sizes(task, split, len)[0] > 0


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("scan").level("actions=23")  # no command has 23
    with pytest.raises(ConfigError, match="below 48"):
        tasks.create("scan", actions=48)
    assert sizes(tasks.create("scan", actions=1), "train", len)[0] == 1
