import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 3356829457  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["train", "longer"])
@pytest.mark.parametrize("back", [1, 2, 4])
def test_targets_are_the_values_so_many_occurrences_ago(back, split):
    task = tasks.create("mqrar", back=back, keys=4, assignments=32)
    batch = task.sample(np.random.default_rng(0), 16, split)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        words, values = task.decode(inputs).split(), {}
        for index in range(0, len(words), 2):
            earlier = values.setdefault(words[index], [])
            assert weights[index] == (len(earlier) >= back)
            assert weights[index + 1] == 0
            if weights[index]:
                assert task.vocabulary[targets[index]] == earlier[-back]
            earlier.append(words[index + 1])


def test_the_published_example():
    """A1 B2 C3 D4 A5 B6 A7 C8 A9 B0, two ago: 1 at the third A, 5 at the next, 2 at the last B."""
    task = tasks.create("mqrar", back=2, keys=4, values=10, assignments=10)

    class Given(np.random.Generator):
        def __init__(self):
            super().__init__(np.random.PCG64())
            self.rows = iter([[0, 1, 2, 3, 0, 1, 0, 2, 0, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])

        def integers(self, high, size):
            return np.array([next(self.rows)])

    batch = task.sample(Given(), 1)
    places = np.flatnonzero(batch["weights"][0]).tolist()
    assert [(index // 2, task.vocabulary[batch["targets"][0, index]]) for index in places] == [
        (6, "1"),
        (8, "5"),
        (9, "2"),
    ]


def test_keys_and_values_are_uniform():
    inputs = tasks.create("mqrar").sample(np.random.default_rng(0), 100)["inputs"]
    for tokens, count in ((inputs[:, ::2], 32), (inputs[:, 1::2] - 32, 64)):
        shares = np.bincount(tokens.ravel(), minlength=count) / tokens.size
        assert len(shares) == count
        assert np.abs(shares * count - 1).max() < 0.2


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="assignments must be at least 65, got 64"):
        tasks.create("mqrar", back=2, assignments=64)
