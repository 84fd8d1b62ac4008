import itertools
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from cope_jax.corpora.text_units import Counts
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.evaluation.text import likelihood
from cope_jax.evaluation.text.likelihood import Losses, losses, sliding
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig

pytestmark = pytest.mark.xdist_group("likelihood")
VOCABULARY = 7


def create(encoding):
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        max_length=8,
        num_layers=2,
        encoding=EncodingConfig.parse(encoding),
        block=BlockConfig(model_dim=8, num_heads=2),
    )
    return Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    return create("cope+rope")


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(VOCABULARY, size=22)


@pytest.fixture(scope="module")
def logits(model):
    """tokens → the logits of the next one; what stands behind the tokens is not seen."""
    graph, state = nnx.split(model)
    read = jax.jit(lambda state, tokens_BL: nnx.merge(graph, state)(tokens_BL))

    def last(tokens):
        tokens_1L = np.zeros((1, 8), np.int32)
        tokens_1L[0, : len(tokens)] = tokens
        return np.asarray(read(state, tokens_1L)[0, len(tokens) - 1], np.float64)

    return last


def by_hand(logits, text, length, stride):
    """Each loss from a call of its own, on what its window has before it."""
    values = []
    for index in range(len(text) - 1):
        begin = 0 if index < length else -(-(index + 1 - length) // stride) * stride
        logits_V = logits(text[begin : index + 1])
        values.append(np.log(np.exp(logits_V).sum()) - logits_V[text[index + 1]])
    return np.array(values)


@given(st.integers(2, 40), st.integers(1, 9), st.data())
def test_windows_count_every_token_once_in_order(size, length, data):
    stride, width = data.draw(st.integers(1, length)), data.draw(st.integers(length, 3 * length))
    inner = data.draw(st.sets(st.integers(1, size - 2))) if size > 2 else set()
    bounds = np.array(sorted({0, size - 1, *inner})) if data.draw(st.booleans()) else None
    text = np.arange(size)
    windows = sliding(text, length, stride, width, bounds)
    rows = windows.take(range(len(windows)))
    inputs, places, segments, positions = (
        rows[name] for name in ("inputs", "entries", "segments", "positions")
    )
    counts = places >= 0
    assert np.array_equal(np.sort(places[counts]), np.arange(size - 1))
    assert np.array_equal(inputs[counts], text[places[counts]])
    assert np.array_equal(rows["targets"][counts], text[places[counts] + 1])
    assert inputs.shape[1] == width
    # A token sees what is before it in its window: all of its document, or at least L - S tokens.
    begin = np.array([0, size - 1]) if bounds is None else bounds
    known = places[counts] - begin[np.searchsorted(begin, places[counts], side="right") - 1] + 1
    seen = positions[counts] + 1
    assert np.all((seen == known) | ((seen > length - stride) & (seen < known)))
    for row in range(len(windows)):
        for column in np.flatnonzero(counts[row]):
            before = segments[row] == segments[row, column]
            before &= positions[row] <= positions[row, column]
            end = places[row, column]
            assert inputs[row][before].tolist() == text[end + 1 - before.sum() : end + 1].tolist()


def test_rows_in_batches_are_the_same_rows():
    windows = sliding(np.arange(22), 4, 3, 9)
    batches = list(windows.batches(3))
    whole = windows.take(range(len(windows)))
    for name, field in whole.items():
        joined = np.concatenate([batch[name] for batch in batches])
        assert np.array_equal(joined[: len(windows)], field)
    assert {batch["inputs"].shape for batch in batches} == {(3, 9)}
    assert np.all(batches[-1]["entries"][len(windows) % 3 :] == -1)


@pytest.mark.parametrize(
    ("length", "stride", "width"), [(8, 8, 8), (8, 3, 8), (4, 2, 8), (3, 2, 8), (2, 1, 8)]
)
def test_losses_are_those_of_each_window_alone(model, logits, text, length, stride, width):
    measured = losses(model, sliding(text, length, stride, width), batch_size=2)
    np.testing.assert_allclose(
        measured.nats, by_hand(logits, text, length, stride), rtol=0, atol=2e-5
    )


def test_documents_are_read_as_if_alone(model, logits, text):
    bounds = np.array([0, 3, 14, 21])
    measured = losses(model, sliding(text, 6, 4, 8, bounds), batch_size=2)
    alone = [
        by_hand(logits, text[start : end + 1], 6, 4) for start, end in itertools.pairwise(bounds)
    ]
    np.testing.assert_allclose(measured.nats, np.concatenate(alone), rtol=0, atol=2e-5)


def test_strides_agree_where_a_window_holds_the_text(model, text):
    whole = [losses(model, sliding(text[:9], 8, stride)).nats for stride in (1, 8)]
    np.testing.assert_array_equal(*whole)


def test_all_lengths_take_one_program(model, text):
    from cope_jax.evaluation.text.likelihood import _losses

    before = _losses._cache_size()
    for length in (1, 2, 4, 8):
        losses(model, sliding(text, length, width=8), batch_size=4)
    assert _losses._cache_size() - before <= 1


def test_longer_windows_than_a_table_are_refused_before_anything_is_read():
    model = create("learned")
    with (
        mock.patch.object(likelihood, "_losses", side_effect=AssertionError("read")),
        pytest.raises(
            ConfigError,
            match=r"^windows of 9 tokens are too long, because position 8 is outside of the learned",
        ),
    ):
        losses(model, sliding(np.arange(22) % VOCABULARY, 9))
    bounds = np.array([0, 8, 10])  # documents that are shorter than the windows
    assert np.isfinite(
        losses(model, sliding(np.arange(11) % VOCABULARY, 12, width=12, bounds=bounds)).nats
    ).all()


def test_a_loss_that_is_no_number_is_one_line(text):
    model = create("rope")
    model.embedding.embedding[...] *= np.nan
    with pytest.raises(
        ConfigError,
        match=r"^the loss of token 0 is not finite: the model has diverged, use an earlier",
    ):
        losses(model, sliding(text, 8))


def test_units():
    nats = np.random.default_rng(0).uniform(1, 3, 50)
    units = Counts(tokens=50, words=20, bytes=130).per_unit(nats.sum())
    probability = np.prod(np.exp(-nats))
    assert units["loss"] == pytest.approx(nats.mean())
    assert units["perplexity"] == pytest.approx(probability ** (-1 / 20))
    assert units["token_perplexity"] == pytest.approx(probability ** (-1 / 50))
    assert 2 ** (-130 * units["bits_per_byte"]) == pytest.approx(probability)


def test_losses_by_what_was_seen():
    measured = Losses(np.arange(12.0), np.tile([1, 2, 3, 4, 5, 6], 2))
    seen, mean = measured.by_seen(6, bins=3)
    assert seen.tolist() == [1.5, 3.5, 5.5]
    assert mean.tolist() == [3.5, 5.5, 7.5]
    assert measured.by_seen(6, bins=9)[0].tolist() == [1, 2, 3, 4, 5, 6]
    with_a_gap = Losses(np.array([4.0, 2.0]), np.array([1, 6]))
    assert [x.tolist() for x in with_a_gap.by_seen(6, bins=3)] == [[1.5, 5.5], [4.0, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([5], 4), "at least 2 tokens"),
        (([5, 6], 4, 5), "a stride of 5 leaves tokens out between windows of 4"),
        (([5] * 9, 4, 4, 3), "rows of 3 tokens have no room for a window of 4"),
        (([5, 6], 0), "length must be at least 1"),
    ],
)
def test_wrong_numbers_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sliding(np.array(arguments[0]), *arguments[1:])
