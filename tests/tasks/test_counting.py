import collections

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 3789789909  # of the data, see test_every_task.py


def run(words):
    """Executes a program; returns the printed value, or None, and the number of operations."""
    values, operations, index = collections.defaultdict(lambda: None), 0, 0
    while words[index] != "print":
        if words[index] == "pass;":
            index += 1
        elif words[index + 1] == "++;":
            if values[words[index]] is not None:
                values[words[index]] += 1
            index += 2
        else:
            assert words[index + 1 : index + 4] == ["=", "0", ";"]
            values[words[index]] = 0
            index += 4
        operations += 1
    return values[words[index + 1]], operations


def programs(task, batch):
    """The words of each program, without padding, and the answer."""
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        (last,) = np.flatnonzero(weights)
        assert (inputs[last + 1 :] == 0).all()
        assert (targets[last + 1 :] == 0).all()
        yield task.decode(inputs[: last + 1]).split(), int(task.decode(targets[last : last + 1]))


@pytest.mark.parametrize("num_variables", [1, 3])
@pytest.mark.parametrize("split", ["train", "pass_10", "pass=2"])
def test_answers_are_what_the_programs_print(num_variables, split):
    task = tasks.create(
        "counting", num_variables=num_variables, max_operations=40, block_length=200, max_value=3
    )
    for words, answer in programs(task, task.sample(np.random.default_rng(0), 64, split)):
        value, operations = run(words)
        assert value == answer
        assert 3 <= operations <= 40


def test_long_programs_lose_their_beginning_only():
    rng = np.random.default_rng
    options = {"max_operations": 40, "pass_weight": 2}
    short = tasks.create("counting", block_length=24, **options)
    whole = tasks.create("counting", block_length=200, **options)
    trimmed = list(programs(short, short.sample(rng(0), 64)))
    untrimmed = list(programs(whole, whole.sample(rng(0), 64)))
    assert max(len(words) for words, _ in trimmed) == 24
    assert max(len(words) for words, _ in untrimmed) > 24
    for (tail, answer), (words, whole_answer) in zip(trimmed, untrimmed, strict=True):
        assert (tail, answer) == (words[-24:], whole_answer)


def literal_program(rng, num_variables, max_value, max_operations, weights):
    """The generator's rules, with their repeated draws: (operations, name asked, answer)."""
    while True:
        values = {}
        operations = int(rng.integers(2, max_operations + 1))
        for _ in range(operations):
            while True:
                kind = rng.choice(3, p=np.array(weights) / sum(weights))
                if kind == 0:
                    values[int(rng.integers(num_variables))] = 0
                elif kind == 1:
                    if not values:
                        continue
                    name = sorted(values)[rng.integers(len(values))]
                    if values[name] == max_value:
                        continue
                    values[name] += 1
                break
        if values:
            name = sorted(values)[rng.integers(len(values))]
            return operations, name, values[name]


def test_distribution_is_that_of_repeated_draws():
    task = tasks.create(
        "counting", num_variables=2, max_value=2, min_operations=2, max_operations=5, set_weight=2, increment_weight=3,
        pass_weight=2, block_length=30,
    )  # fmt: skip
    n_literal, n = 4000, 40_000
    rng = np.random.default_rng(0)
    literal = collections.Counter(
        literal_program(rng, 2, 2, 5, (2, 3, 2)) for _ in range(n_literal)
    )
    ours = collections.Counter(
        (run(words)[1], "ab".index(words[-1]), answer)
        for words, answer in programs(task, task.dataset("train", n))
    )
    # Every operation count, name and answer but 2 after two operations.
    assert len(ours) == len(literal) == 4 * 2 * 3 - 2
    for cell in literal:
        p, q = literal[cell] / n_literal, ours[cell] / n
        # Five standard deviations of the difference of two binomial shares.
        assert abs(p - q) < 5 * np.sqrt(q * (1 - q) * (1 / n_literal + 1 / n)), cell


# Figures of 4,000 samples each: share of questions that lost their `set`, tokens from that `set` to
# the question.
@pytest.mark.parametrize(
    ("num_variables", "split", "lost", "relevant"),
    [
        (1, "in_distribution", 0.0, 54),
        (3, "in_distribution", 0.003, 115),
        pytest.param(5, "in_distribution", 0.0045, 134, marks=pytest.mark.slow),
        pytest.param(1, "pass_100", None, 86, marks=pytest.mark.slow),
        (1, "pass_10", None, 22),
    ],
)
def test_statistics_of_the_published_recipe(num_variables, split, lost, relevant):
    n = 4000
    task = tasks.create("counting", num_variables=num_variables, block_length=2050)
    batch = task.dataset(split, n)
    inputs, asked_at = batch["inputs"], np.argmax(batch["weights"], axis=1)
    answers = batch["targets"][np.arange(n), asked_at]
    asked = inputs[np.arange(n), asked_at][:, None]
    is_set = (inputs[:, :-1] == asked) & (inputs[:, 1:] == task.encode("=")[0])
    # From the last `set` of the variable up to `print`.
    distance = asked_at - 1 - np.max(np.where(is_set, np.arange(is_set.shape[1]), -1), axis=1)
    assert is_set.any(axis=1).all()
    # Both means are of 4,000 samples, the known ones rounded to 1: four standard errors of their
    # difference.
    assert abs(distance.mean() - relevant) < 4 * distance.std() * np.sqrt(2 / n) + 0.5

    # The known range of the share of the answer 10, with four standard errors on both sides.
    share = np.mean(answers == task.encode("10")[0])
    assert 0.17 - 4 * np.sqrt(0.17 * 0.83 / n) < share < 0.23 + 4 * np.sqrt(0.23 * 0.77 / n)

    if lost is not None:
        assert task.decode([np.bincount(answers).argmax()]) == "10"
        length = asked_at + 1
        mean_error = 4 * length.std() / np.sqrt(n)
        assert 316 - mean_error < length.mean() < 323 + mean_error
        assert abs(np.mean(length > 512) - 0.14) < 4 * np.sqrt(2 * 0.14 * 0.86 / n) + 0.005
        # `print` and the name take two of the 512 tokens. Where none was seen lost, 7 of 4,000 is
        # the limit at 99.9 %.
        assert abs(np.mean(distance + 2 > 512) - lost) < max(7 / n, 4 * np.sqrt(2 * lost / n))


def test_split_names_follow_the_weights():
    task = tasks.create("counting", ood_pass_weights=(7, 0.5))
    assert task.splits == ("train", "in_distribution", "pass_7", "pass_0.5")
    assert task.level("pass_0.5") == 0.5


def test_length_is_no_more_than_the_longest_program():
    assert tasks.create("counting", max_operations=3).length("train") == 14
    assert tasks.create("counting").length("train") == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_variables": 27}, "num_variables"),
        ({"max_value": 0}, "max_value"),
        ({"min_operations": 4, "max_operations": 3}, "min_operations <= max_operations"),
        ({"block_length": 1}, "block_length"),
        ({"set_weight": 0}, "set_weight"),
        ({"pass_weight": -1}, "weights of counting"),
        ({"ood_pass_weights": (-1,)}, "weights of counting"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("counting", **options)
