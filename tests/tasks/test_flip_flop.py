import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 120252305  # of the data, see test_every_task.py


def recalled(words):
    """For each `r` in a text, its place and the bit written last."""
    written = None
    for index, word in enumerate(words):
        if word == "w":
            written = words[index + 1]
        if word == "r":
            yield index, written


@pytest.mark.parametrize("split", ["train", "in_distribution", "dense", "sparse", "ignore=0.5"])
def test_weighted_targets_are_the_last_written_bits(split):
    task = tasks.create("flip_flop", length=64)
    batch = task.sample(np.random.default_rng(0), 32, split)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        words = task.decode(inputs).split()
        bits = task.decode(targets).split()
        assert list(recalled(words)) == [(index, bits[index]) for index in np.flatnonzero(weights)]


def test_form():
    task = tasks.create("flip_flop", length=32)
    words = np.array(task.vocabulary)[task.sample(np.random.default_rng(0), 64)["inputs"]]
    assert np.isin(words[:, ::2], ["w", "r", "i"]).all()
    assert np.isin(words[:, 1::2], ["0", "1"]).all()
    assert (words[:, 0] == "w").all()
    assert (words[:, -1] == "r").all()
    assert words.shape == (64, 31)


@pytest.mark.parametrize(
    ("split", "p_ignore"),
    [("train", 0.8), ("in_distribution", 0.8), ("dense", 0.1), ("sparse", 0.98)],
)
def test_frequencies(split, p_ignore):
    task = tasks.create("flip_flop")
    inner = task.dataset(split, 400)["inputs"][:, 2:-1]
    words = np.array(task.vocabulary)[inner]
    instructions, bits, count = words[:, ::2], words[:, 1::2], 400 * 254
    for word, p in {"i": p_ignore, "w": (1 - p_ignore) / 2, "r": (1 - p_ignore) / 2}.items():
        # Independent draws: five standard deviations of a binomial share.
        assert abs(np.mean(instructions == word) - p) < 5 * np.sqrt(p * (1 - p) / count)
    ignored = bits[instructions == "i"]
    assert abs(np.mean(ignored == "1") - 0.5) < 5 * np.sqrt(0.25 / ignored.size)


def test_vocabulary_is_that_of_the_published_data():
    assert tasks.create("flip_flop").vocabulary == ("w", "r", "i", "0", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 7}, "even"),
        ({"length": 2}, "at least 4"),
        ({"sparse_p_ignore": 1.5}, "sparse_p_ignore"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("flip_flop", **options)


def test_levels_out_of_range():
    with pytest.raises(ConfigError, match=r"use one like 'ignore=0.98'"):
        tasks.create("flip_flop").length("ignore=1.5")
