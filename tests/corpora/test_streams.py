import numpy as np
import pytest

from cope_jax.corpora.streams import Stream, drawn, first, windows
from cope_jax.errors import ConfigError


@pytest.mark.parametrize("size", [1, 7, 24, 25])
@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (2, 5), (4, 3), (30, 2)])
def test_rows_go_on_and_every_entry_comes_once(size, batch_size, length):
    stream = Stream(
        {"inputs": np.arange(1, size + 1), "weights": np.ones(size)}, batch_size, length
    )
    batches = list(stream)
    assert len(batches) == len(stream)
    rows = np.concatenate([batch["inputs"] for batch in batches], axis=1)
    entries = rows[rows > 0]  # row after row
    np.testing.assert_array_equal(entries, np.arange(1, size + 1))
    assert sum(batch["weights"].sum() for batch in batches) == size
    for row in rows:
        kept = row[row > 0]
        np.testing.assert_array_equal(row[: len(kept)], kept)  # what fills up stands last
    assert {batch["inputs"].shape for batch in batches} == {(batch_size, length)}


def test_only_the_first_batch_resets():
    stream = Stream({"inputs": np.arange(20)}, 2, 3)
    assert [batch["reset"].tolist() for batch in stream] == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert stream[0]["reset"].dtype == np.float32


def test_random_access():
    stream = Stream({"inputs": np.arange(20)}, 2, 3)
    np.testing.assert_array_equal(stream[-1]["inputs"], list(stream)[3]["inputs"])
    assert [stream[index]["inputs"][0, 0] for index in (1, 2)] == [3, 6]
    with pytest.raises(IndexError):
        stream[4]


def test_batches_are_finished():
    stream = Stream({"inputs": np.arange(4)}, 1, 2, lambda batch: {"inputs": batch["inputs"] * 10})
    assert stream[1]["inputs"].tolist() == [[20, 30]]


def test_nothing_to_stream_and_sizes_out_of_range():
    with pytest.raises(ConfigError, match="a split has no words"):
        Stream({"inputs": np.zeros(0)}, 1, 1)
    with pytest.raises(ConfigError, match=r"stream.batch_size must be at least 1"):
        Stream({"inputs": np.zeros(3)}, 0, 1)


def test_windows_end_in_zeros():
    assert windows({"x": np.arange(1, 4)}, np.array([2, 0]), 2)["x"].tolist() == [[3, 0], [1, 2]]


def test_numbers_of_examples_are_checked(rng):
    assert first(0, 3, "x").size == 0
    for bad in (lambda: first(-1, 3, "x"), lambda: first(4, 3, "x"), lambda: drawn(rng, -1, 3)):
        with pytest.raises(ConfigError):
            bad()
    assert set(drawn(rng, 100, 3).tolist()) == {0, 1, 2}
