import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_jax.corpora.packing import Packed, fit, join
from cope_jax.errors import ConfigError

END = 0
# Texts whose tokens are all different tell what is lost, repeated or out of order; some end with
# `END` themselves.
documents = st.lists(st.tuples(st.integers(0, 23), st.booleans()), min_size=1, max_size=8).filter(
    lambda sizes: any(size for size, _ in sizes)
)
short = settings(max_examples=60, deadline=None)


def texts(sizes):
    ends = np.cumsum([size for size, _ in sizes])
    bare = [
        np.arange(end - size + 1, end + 1, dtype=np.int32)
        for end, (size, _) in zip(ends, sizes, strict=True)
    ]
    return [
        np.append(text, END) if has_end and len(text) else text
        for text, (_, has_end) in zip(bare, sizes, strict=True)
    ]


def everything(packed):
    return packed.take(np.arange(len(packed)))


@pytest.mark.parametrize("packing", ["stream", "documents"])
@short
@given(sizes=documents, length=st.integers(1, 9))
def test_packing_loses_and_repeats_no_token(packing, sizes, length):
    entries = join(texts(sizes), END)
    batch = everything(Packed(entries, length, packing, every=False))
    said = batch["targets"][batch["weights"] == 1]
    wanted = np.concatenate(texts(sizes))
    assert sorted(said.tolist()) == sorted(wanted.tolist())
    if packing == "stream":
        np.testing.assert_array_equal(said, wanted)
    whole = everything(Packed(entries, length, packing, every=True))
    added = sum(len(text) > 0 and text[-1] != END for text in texts(sizes))
    assert whole["weights"].sum() == len(wanted) + added


@short
@given(sizes=documents, length=st.integers(1, 9))
def test_documents_are_told_apart_and_read_in_order(sizes, length):
    batch = everything(Packed(join(texts(sizes), END), length, "documents", every=True))
    owner = {
        int(token): number
        for number, text in enumerate(texts(sizes))
        for token in text
        if token != END
    }
    assert {name: field.shape[1] for name, field in batch.items()} == dict.fromkeys(batch, length)
    for inputs, targets, weights, segments, positions in zip(
        *(batch[name] for name in ("inputs", "targets", "weights", "segments", "positions")),
        strict=True,
    ):
        number = int(segments.max())
        assert number > 0
        np.testing.assert_array_equal(weights, segments > 0)  # what fills up counts for nothing
        assert not (
            inputs[segments == 0].any()
            or targets[segments == 0].any()
            or positions[segments == 0].any()
        )
        for segment in range(1, number + 1):
            (indices,) = np.nonzero(segments == segment)
            np.testing.assert_array_equal(indices, indices[0] + np.arange(len(indices)))
            np.testing.assert_array_equal(positions[indices], np.arange(len(indices)))
            np.testing.assert_array_equal(inputs[indices[1:]], targets[indices[:-1]])
            tokens = [int(token) for token in targets[indices] if token != END]
            assert len({owner[token] for token in tokens}) <= 1
            assert tokens == sorted(tokens)
            if inputs[indices[0]] != END:  # the rest of a document that was cut
                assert inputs[indices[0]] + 1 == targets[indices[0]] or targets[indices[0]] == END


@short
@given(sizes=st.lists(st.integers(1, 12), max_size=30))
def test_rows_hold_each_piece_once_and_no_two_fit_into_one(sizes):
    rows = fit(sizes, 12)
    assert sorted(piece for row in rows for piece in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[piece] for piece in row) for row in rows)
    assert all(total <= 12 for total in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 12
    assert rows == sorted(sorted(row) for row in rows)


def test_each_piece_goes_where_the_least_room_is_left():
    assert fit([6, 5, 4, 1], 10) == [[0, 2], [1, 3]]
    assert fit([], 4) == []


def test_windows_of_a_stream_go_on_and_the_last_is_filled_up():
    batch = everything(Packed(join([np.arange(1, 6)], END), 4, "stream", every=False))
    assert batch["inputs"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert {name: field.dtype for name, field in batch.items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "weights": np.float32,
    }


def test_examples_come_in_any_order():
    packed = Packed(join([np.arange(1, 20), np.arange(20, 24)], END), 4, "documents", every=False)
    whole = everything(packed)
    for name, field in packed.take(np.array([3, 0, 3])).items():
        np.testing.assert_array_equal(field, whole[name][[3, 0, 3]])
    assert packed.take(np.array([], int))["inputs"].shape == (0, 4)


def test_a_length_of_nothing_is_one_line():
    with pytest.raises(ConfigError, match=r"^packing.length must be at least 1, got 0$"):
        Packed(join([np.arange(3)], END), 0, "stream", every=False)
