import itertools

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import sentences_by_corpus
from cope_jax.errors import ConfigError
from cope_jax.tasks.masked_lm import _kept, _trimmed
from tests.corpora.data import real, write

LENGTH, N = 48, 3000


@pytest.fixture(scope="module")
def task():
    return tasks.create("masked_lm", length=LENGTH, vocab_size=512)


@pytest.fixture(scope="module")
def batch(task):
    return task.sample(np.random.default_rng(0), N)


@pytest.fixture(scope="module")
def documents(task):
    """Each document of training as a string of pieces, with spaces around."""
    return [
        f" {task.wordpiece.decode(itertools.chain.from_iterable(task.wordpiece.encode_words(s)[0] for s in document))} "
        for document in sentences_by_corpus.documents("wikitext-2", None, "train")
    ]


def sides(task, batch, row):
    """A and B as strings of pieces, with spaces around."""
    ids, segments = (batch[name][row][batch["mask"][row] == 1] for name in ("targets", "segments"))
    first, second = ids[segments == 0], ids[segments == 1]
    assert (first[0], first[-1], second[-1]) == (
        task.wordpiece.cls,
        task.wordpiece.sep,
        task.wordpiece.sep,
    )
    return f" {task.wordpiece.decode(first[1:-1])} ", f" {task.wordpiece.decode(second[:-1])} "


@pytest.mark.newest
def test_fields(task, batch):
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "inputs": ((N, LENGTH), np.int32),
        "segments": ((N, LENGTH), np.int32),
        "mask": ((N, LENGTH), np.int32),
        "targets": ((N, LENGTH), np.int32),
        "weights": ((N, LENGTH), np.float32),
        "next": ((N,), np.int32),
    }
    assert task.size("train") is None
    assert task.splits == ("train", "validation", "test")
    padding = batch["mask"] == 0
    assert not batch["inputs"][padding].any()
    assert not batch["segments"][padding].any()
    assert (np.diff(batch["mask"], axis=1) <= 0).all()
    assert (np.diff(batch["segments"] + 2 * (1 - batch["mask"]), axis=1) >= 0).all()


def test_b_follows_a_or_is_of_another_document(task, batch, documents):
    whole = 0
    for row in range(500):
        first, second = sides(task, batch, row)
        mine = [document for document in documents if first in document]
        assert mine
        assert any(second in document for document in documents)
        if batch["next"][row]:
            assert any(
                second in document
                for document in documents
                if document not in mine or len(mine) > 1
            )
        elif batch["mask"][row].sum() < LENGTH:  # where nothing was cut off, B stands right after A
            whole += 1
            assert any(first + second[1:] in document for document in mine)
        else:
            assert any(second in document for document in mine)
    assert whole > 10


def test_half_follow_and_a_tenth_are_short(batch):
    assert 0.45 < batch["next"].mean() < 0.75  # above ½, since short ones often have one sentence
    lengths = batch["mask"].sum(axis=1)
    assert lengths.max() == LENGTH
    assert lengths.min() < 20
    assert (lengths == LENGTH).mean() > 0.5


def test_a_document_of_one_sentence_is_never_followed(tmp_path):
    for split in ("train", "valid", "test"):
        folder = write(
            tmp_path,
            f"wikitext-2/wiki.{split}.tokens",
            "\n = A = \n\n a b . \n\n = B = \n\n c d . \n\n",
        )
    task = tasks.create("masked_lm", data_dir=folder, length=16, vocab_size=64)
    assert task.sample(np.random.default_rng(0), 50)["next"].all()


def test_as_many_are_predicted_as_should_be(batch):
    pieces, predicted = batch["mask"].sum(axis=1), batch["weights"].sum(axis=1)
    expected = [max(1, round(0.15 * int(n))) for n in pieces]
    np.testing.assert_array_equal(predicted, expected)


def test_special_and_unknown_pieces_are_never_predicted(task, batch):
    chosen = batch["targets"][batch["weights"] > 0]
    special = task.wordpiece
    assert not np.isin(
        chosen, [special.pad, special.unknown, special.cls, special.sep, special.mask]
    ).any()


def test_unknown_words_are_not_predicted(tmp_path):
    text = "\n = A = \n\n <unk> b <unk> <unk> . <unk> ! \n\n = B = \n\n c <unk> . \n\n"
    for split in ("train", "valid", "test"):
        folder = write(tmp_path, f"wikitext-2/wiki.{split}.tokens", text)
    task = tasks.create("masked_lm", data_dir=folder, length=16, vocab_size=64, mask_rate=1.0)
    batch = task.sample(np.random.default_rng(0), 50)
    assert (batch["targets"] == task.wordpiece.unknown).any()
    assert not (batch["weights"] * (batch["targets"] == task.wordpiece.unknown)).any()
    assert not any("unk" in piece for piece in task.wordpiece.pieces)


def test_most_are_hidden_some_random_some_stay(task, batch):
    chosen = batch["weights"] > 0
    inputs, targets = batch["inputs"][chosen], batch["targets"][chosen]
    hidden = inputs == task.wordpiece.mask
    kept = inputs == targets
    assert abs(hidden.mean() - 0.8) < 0.015  # 18,000 draws: 5 deviations
    assert abs(kept.mean() - 0.1) < 0.012
    others = inputs[~hidden & ~kept]
    assert abs(len(others) / len(inputs) - 0.1) < 0.012
    assert others.min() < 5  # any piece, special ones too
    assert len(np.unique(others)) > 0.8 * task.vocab_size
    np.testing.assert_array_equal(batch["inputs"][~chosen], batch["targets"][~chosen])


def test_every_place_is_as_likely(batch):
    full = batch["mask"].sum(axis=1) == LENGTH
    rate = batch["weights"][full][:, 1:20].mean(axis=0)
    assert rate.min() > 0.5 * rate.max()


def test_the_most_predictions():
    task = tasks.create("masked_lm", length=LENGTH, vocab_size=512, max_predictions=3)
    assert task.sample(np.random.default_rng(0), 50)["weights"].sum(axis=1).max() == 3


def test_the_longer_side_is_cut_at_either_end(rng):
    pieces = np.arange(10)
    cuts = [_trimmed(rng, pieces, 4) for _ in range(200)]
    assert all(np.array_equal(np.diff(cut), [1, 1, 1]) for cut in cuts)
    assert {int(cut[0]) for cut in cuts} == set(range(7))
    assert abs(np.mean([cut[0] for cut in cuts]) - 3) < 0.5
    np.testing.assert_array_equal(_trimmed(rng, pieces, 10), pieces)


@pytest.mark.parametrize("most", [2, 5, 8])
def test_what_is_kept_is_as_cutting_one_by_one(most):
    for a, b in itertools.product(range(1, 12), repeat=2):
        first, second = a, b
        while first + second > most:
            if first > second:
                first -= 1
            else:
                second -= 1
        assert _kept(a, b, most) == (first, second)


def test_examples_are_fresh_and_datasets_fixed(task):
    rng = np.random.default_rng(0)
    first, second = task.sample(rng, 4), task.sample(rng, 4)
    assert not np.array_equal(first["inputs"], second["inputs"])
    for name, array in task.dataset("test", 4, seed=1).items():
        np.testing.assert_array_equal(array, task.dataset("test", 4, seed=1)[name])


def test_a_vocabulary_is_kept_and_taken(task, tmp_path):
    (tmp_path / "vocab.txt").write_text(task.saved_files()["vocab.txt"], encoding="utf-8")
    again = tasks.create("masked_lm", length=LENGTH, vocab=str(tmp_path / "vocab.txt"))
    assert again.wordpiece.pieces == task.wordpiece.pieces
    np.testing.assert_array_equal(
        again.dataset("test", 2)["inputs"], task.dataset("test", 2)["inputs"]
    )


def test_always_the_same_piece_is_a_baseline(task):
    assert 0.03 < task.unigram_accuracy("test") < 0.2
    known = {}
    for split in ("train", "test"):
        texts = sentences_by_corpus.documents("wikitext-2", None, split)
        pieces = np.array(
            task.wordpiece.encode_words([word for text in texts for s in text for word in s])[0]
        )
        known[split] = pieces[pieces != task.wordpiece.unknown]
    assert task.unigram_accuracy("test") == np.mean(
        known["test"] == np.bincount(known["train"]).argmax()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 4}, r"masked_lm.length must be at least 5"),
        ({"mask_rate": 0.0}, r"masked_lm.mask_rate must be above 0"),
        ({"max_predictions": 0}, r"masked_lm.max_predictions must be at least 1"),
        ({"vocab_size": 40}, r"a WordPiece vocabulary of 40 has no room"),
        ({"vocab": "nowhere.txt"}, r"cannot read nowhere.txt"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("masked_lm", **options)


def test_one_document_is_too_few(tmp_path):
    for split in ("train", "valid", "test"):
        folder = write(tmp_path, f"wikitext-2/wiki.{split}.tokens", "a b . \n")
    with pytest.raises(
        ConfigError, match="a split has only 1: give each split at least 2 documents"
    ):
        tasks.create("masked_lm", data_dir=folder, vocab_size=64)


@pytest.mark.slow
def test_on_wikitext(rng):
    task = tasks.create("masked_lm", data_dir=real("wikitext-2/wiki.train"))
    assert task.vocab_size == 8192
    assert 0.05 < task.unigram_accuracy("validation") < 0.07
    assert abs(task.sample(rng, 2000)["next"].mean() - 0.5) < 0.06
