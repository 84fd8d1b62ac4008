import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 4291941683  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["train", "longest"])
@pytest.mark.parametrize("space", [3, 8])
@pytest.mark.parametrize("form", ["plain", "forgetting", "compositional"])
def test_targets_are_the_values_that_the_keys_have_last(form, space, split):
    task = tasks.create("mqar", form=form, updates=4, vocabulary=40, space=space)
    batch = task.sample(np.random.default_rng(0), 64, split)
    pairs, size = int(task.level(split)), 2 if form == "compositional" else 1
    lines = pairs + (4 if form == "forgetting" else 0)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        value_of, changed = {}, 0
        for line in inputs[: lines * (size + 1)].reshape(lines, size + 1).tolist():
            *key, value = line
            assert max(key) < 20 <= value
            assert value_of.get(tuple(key)) != value
            changed += tuple(key) in value_of
            value_of[tuple(key)] = value
        assert (len(value_of), changed) == (pairs, lines - pairs)
        asked = np.flatnonzero(weights)
        assert (len(asked), len(inputs)) == (pairs, space * (size + 1) * pairs)
        assert asked.min() >= lines * (size + 1)
        keys = [tuple(inputs[index - size + 1 : index + 1].tolist()) for index in asked]
        assert set(keys) == set(value_of)
        assert [value_of[key] for key in keys] == targets[asked].tolist()
        places = {index - offset for index in asked.tolist() for offset in range(size)}
        others = set(range(lines * (size + 1), len(inputs))) - places
        assert not {token for key in value_of for token in key} & {
            int(inputs[index]) for index in others
        }


def test_compositional_keys_share_their_tokens():
    batch = tasks.create("mqar", form="compositional", pairs=9).sample(np.random.default_rng(0), 8)
    for row in batch["inputs"]:
        keys = row[:27].reshape(9, 3)[:, :2]
        assert [len(set(column)) for column in keys.T.tolist()] == [3, 3]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(1, 1.0), (3, 0.67), (4, 0), (5, 0.40), (6, 0.21), (9, 0), (10, 0.085), (16, 0)],
)
def test_no_token_alone_says_the_value_if_the_pairs_are_a_square(pairs, expected):
    task = tasks.create("mqar", form="compositional", pairs=pairs)
    single = []
    for row in task.sample(np.random.default_rng(0), 400)["inputs"]:
        keys = row[: 3 * pairs].reshape(pairs, 3)[:, :2]
        tokens, counts = np.unique(keys, return_counts=True)
        once = set(tokens[counts == 1].tolist())
        single += [bool(once & set(key)) for key in keys.tolist()]
    assert abs(np.mean(single) - expected) < (0.02 if expected else 1e-9)


def test_queries_are_near_the_pairs():
    weights = tasks.create("mqar").sample(np.random.default_rng(0), 500)["weights"]
    places = np.nonzero(weights)[1] - 8
    assert places.min() == 0
    assert places.max() > 50
    assert np.median(places) < 15
    single = tasks.create("mqar", pairs=1).sample(np.random.default_rng(0), 4000)["weights"]
    first = np.mean(np.nonzero(single)[1] == 2)
    assert abs(first - 1 / (np.arange(1, 15) ** -0.99).sum()) < 0.03


@pytest.mark.parametrize(
    ("options", "spacing"),
    [
        ({"every": 2}, 2),
        ({"every": 4}, 4),
        ({"every": 2, "form": "forgetting", "space": 4}, 2),
        ({}, 1),
    ],
)
def test_a_query_begins_at_every_nth_token(options, spacing):
    """The published generator asks g at token 2 · pairs + 2 · g, p(g) ∝ (g + 1)^(power − 1)."""
    task = tasks.create("mqar", **options)
    for split in task.splits:
        batch = task.sample(np.random.default_rng(0), 200, split)
        pairs = int(task.level(split))
        begin = 2 * pairs + (4 if options.get("form") == "forgetting" else 0)
        row, index = np.nonzero(batch["weights"])
        assert np.gcd.reduce(index - begin) == spacing
        assert (index - begin).max() > (batch["inputs"].shape[1] - begin) * 0.9 - spacing
        assert (batch["weights"].sum(axis=1) == pairs).all()
        assert (batch["inputs"][row, index] < task.vocab_size // 2).all()
    single = tasks.create("mqar", **options | {"pairs": 2, "updates": 2}).sample(
        np.random.default_rng(0), 1
    )
    assert single["weights"].sum() == 2


def test_the_published_places_have_the_published_frequencies():
    weights = tasks.create("mqar", pairs=1, every=2).sample(np.random.default_rng(0), 4000)[
        "weights"
    ]
    gaps = (np.nonzero(weights)[1] - 2) // 2
    shares = np.arange(1, 8) ** -0.99
    assert np.abs(np.bincount(gaps, minlength=7) / 4000 - shares / shares.sum()).max() < 0.03


def test_the_largest_power_asks_far_from_the_pairs():
    weights = tasks.create("mqar", power=10.0, space=1000).sample(np.random.default_rng(0), 9)
    assert (weights["weights"].sum(axis=1) == 4).all()
    assert np.nonzero(weights["weights"])[1].min() > 4000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 32}, "above 32, eight for each pair"),
        ({"vocabulary": 101}, "must be even"),
        ({"space": 2}, "space must be at least 3"),
        ({"power": 0.0}, r"power must lie in \(0, 10\], got 0.0"),
        ({"power": 400.0}, r"power must lie in \(0, 10\], got 400.0"),
        ({"updates": 5, "form": "forgetting"}, "at most pairs=4"),
        ({"every": 0}, "every must lie between 1, the size of a key, and 14, .* got 0"),
        (
            {"every": 1, "form": "compositional"},
            "every must lie between 2, the size of a key, and 21",
        ),
        (
            {"every": 3, "space": 3, "form": "forgetting"},
            "and 2, so that all queries have room, got 3",
        ),
    ],
)
def test_mistakes_are_loud(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("mqar", **options)
