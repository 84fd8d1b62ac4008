import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 3914097561  # of the data, see test_every_task.py


@pytest.mark.parametrize(
    ("split", "blanks"),
    [("train", 6), ("in_distribution", 6), ("dense", 3), ("sparse", 12), ("blanks=0", 0)],
)
def test_weighted_targets_are_the_symbols_in_order(split, blanks):
    task = tasks.create("selective_copy", num_tokens=5, num_blanks=6)
    batch = task.sample(np.random.default_rng(0), 32, split)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        read, _, copied = task.decode(inputs).partition(" | ")
        symbols = [word for word in read.split() if word != "_"]
        assert len(symbols) == 5
        assert len(read.split()) == 5 + blanks
        assert task.decode(targets[weights == 1]).split() == symbols
        assert copied.split() == symbols[:-1]


def test_default_vocabulary_and_lengths():
    task = tasks.create("selective_copy")
    assert task.vocab_size == 16
    assert {split: task.length(split) for split in task.splits} == {
        "train": 768,
        "in_distribution": 768,
        "dense": 640,
        "sparse": 1024,
    }


def test_blanks_of_the_splits_can_be_chosen():
    task = tasks.create(
        "selective_copy", num_tokens=2, num_blanks=4, dense_blanks=1, sparse_blanks=20
    )
    assert [task.level(split) for split in task.splits] == [4, 4, 1, 20]
    assert task.max_length == 24


def test_symbols_and_places_are_uniform():
    task = tasks.create("selective_copy", num_symbols=4, num_tokens=3, num_blanks=5)
    read = task.dataset("train", 4000)["inputs"][:, :8]
    blank = read == 0
    # Five standard deviations of a binomial share; each place holds a symbol with 3/8.
    assert np.abs((~blank).mean(axis=0) - 3 / 8).max() < 5 * np.sqrt(3 / 8 * 5 / 8 / 4000)
    share = np.bincount(read[~blank], minlength=6)[2:] / 12000
    assert np.abs(share - 1 / 4).max() < 5 * np.sqrt(1 / 4 * 3 / 4 / 12000)
    # Neighbouring places are drawn without replacement: 3/8 · 2/7.
    both = np.mean(~blank[:, 0] & ~blank[:, 1])
    assert abs(both - 6 / 56) < 5 * np.sqrt(6 / 56 * 50 / 56 / 4000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_symbols": 0}, "num_symbols"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"dense_blanks": -1}, "dense_blanks"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("selective_copy", **options)


@pytest.mark.parametrize("split", ["blanks=2.5", "blanks=-1"])
def test_levels_out_of_range(split):
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("selective_copy").length(split)
