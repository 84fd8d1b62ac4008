import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import conllu
from cope_jax.errors import ConfigError
from cope_jax.tokenizers.characters import characters
from cope_jax.tokenizers.wordpiece import SPECIALS, WordPiece
from tests.corpora.data import real

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def task():
    return tasks.create("tagging", length=12)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    words = (" ".join(sentence.words) for sentence in conllu.read(None, "train"))
    path.write_text(WordPiece.train(words, 150).text, encoding="utf-8")
    return str(path)


def text(split):
    sentences = conllu.read(None, split)
    return [
        pair for sentence in sentences for pair in zip(sentence.words, sentence.tags, strict=True)
    ]


@pytest.mark.newest
@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("split", SPLITS)
def test_every_word_comes_once_in_order(split, length):
    task = tasks.create("tagging", length=length, max_characters=9)
    batch, pairs = task.dataset(split, task.size(split)), text(split)
    kept = batch["weights"] > 0
    assert [task.tags[tag] for tag in batch["targets"][kept]] == [tag for _, tag in pairs]
    np.testing.assert_array_equal(
        batch["characters"][kept], characters([word for word, _ in pairs], 9)
    )
    expected = task.vocabulary.encode(word.lower() for word, _ in pairs)
    np.testing.assert_array_equal(batch["inputs"][kept], expected)
    assert batch["inputs"].shape == (task.size(split), length)
    for name in ("inputs", "targets", "characters"):
        assert batch[name].dtype == np.int32
        assert not batch[name][~kept].any()


def test_sentences_are_not_joined(task):
    batch = task.dataset("train", task.size("train"))
    np.testing.assert_array_equal(
        batch["weights"].sum(axis=1), [len(words) for words in task.sentences("train")]
    )


def test_words_that_occur_once_are_unknown(task):
    lowered = [word.lower() for word, _ in text("train")]
    assert set(task.vocabulary.words[1:]) == {word for word in lowered if lowered.count(word) > 1}
    assert task.vocab_size == len(task.vocabulary)
    batch = task.dataset("train", task.size("train"))
    assert (batch["inputs"][batch["weights"] > 0] == task.vocabulary.unknown).any()


def test_examples_at_places(task, rng):
    whole = task.dataset("test", task.size("test"))
    some = task.take("test", np.array([4, 0]))
    for name, array in some.items():
        np.testing.assert_array_equal(array, whole[name][[4, 0]])
    assert task.sample(rng, 5, "test")["inputs"].shape == (5, 12)
    with pytest.raises(ConfigError, match="of tagging has 6 examples, not 7"):
        task.dataset("test", 7)


@pytest.mark.parametrize("length", [4, 12])
def test_pieces_stand_where_starts_say(vocab, length):
    task = tasks.create("tagging", length=length, pieces=vocab, max_pieces=14)
    wordpiece = WordPiece.load(vocab)
    assert (task.vocab_size, task.max_length, task.length("test")) == (len(wordpiece), 14, 14)
    batch, pairs = task.dataset("test", task.size("test")), text("test")
    kept = batch["weights"] > 0
    assert (
        batch["inputs"].shape
        == batch["mask"].shape
        == batch["segments"].shape
        == (task.size("test"), 14)
    )
    assert batch["starts"].shape == batch["targets"].shape == (task.size("test"), length)
    assert [task.tags[tag] for tag in batch["targets"][kept]] == [tag for _, tag in pairs]
    firsts = np.take_along_axis(batch["inputs"], batch["starts"], axis=1)[kept]
    assert firsts.tolist() == [wordpiece.encode_words([word])[0][0] for word, _ in pairs]
    every = []
    for ids, mask in zip(batch["inputs"], batch["mask"], strict=True):
        ids, padding = ids[mask == 1].tolist(), ids[mask == 0]
        assert (ids[0], ids[-1]) == (wordpiece.cls, wordpiece.sep)
        assert (padding == wordpiece.pad).all()
        every += ids[1:-1]
    assert every == wordpiece.encode_words([word for word, _ in pairs])[0]
    assert task.saved_files() == {"vocab.txt": wordpiece.text}


def test_a_word_longer_than_an_example_keeps_its_first_pieces(tmp_path):
    letters = "THEOLDFRYCASIBKWNUGMPVLXQJZ".lower()
    vocabulary = WordPiece(
        dict.fromkeys([*SPECIALS, *letters, *(f"##{c}" for c in letters), *".,!?$4'"])
    )
    (tmp_path / "vocab.txt").write_text(vocabulary.text, encoding="utf-8")
    task = tasks.create("tagging", pieces=str(tmp_path / "vocab.txt"), max_pieces=6, length=3)
    batch = task.dataset("train", task.size("train"))
    assert batch["weights"].sum() == len(text("train"))
    assert batch["mask"].sum(axis=1).max() == 6


def vectors_of(task, folder, archive, layers=2, width=3):
    arrays = {}
    for split in SPLITS:
        words = sum(map(len, task.sentences(split)))
        arrays[split] = (
            np.random.default_rng(words).normal(size=(words, layers, width)).astype(np.float16)
        )
    if archive:
        np.savez(folder / "vectors.npz", **arrays)
        return str(folder / "vectors.npz"), arrays
    for split, array in arrays.items():
        np.save(folder / f"{split}.npy", array)
    return str(folder), arrays


@pytest.mark.parametrize("archive", [True, False])
def test_vectors_go_with_their_words(task, tmp_path, archive):
    path, arrays = vectors_of(task, tmp_path, archive)
    with_vectors = tasks.create("tagging", length=5, vectors=path)
    assert with_vectors.vector_shape == (2, 3)
    assert task.vector_shape is None
    batch = with_vectors.dataset("test", with_vectors.size("test"))
    assert batch["vectors"].shape == (with_vectors.size("test"), 5, 2, 3)
    assert batch["vectors"].dtype == np.float32
    np.testing.assert_array_equal(
        batch["vectors"][batch["weights"] > 0], arrays["test"].astype(np.float32)
    )
    assert not batch["vectors"][batch["weights"] == 0].any()


def test_vectors_of_other_words_are_an_error(task, tmp_path):
    path, arrays = vectors_of(task, tmp_path, archive=False)
    np.save(tmp_path / "test.npy", arrays["test"][1:])
    with pytest.raises(
        ConfigError, match=r"the vectors of 'test' at .* have shape .* make them from the same"
    ):
        tasks.create("tagging", vectors=path)
    (tmp_path / "validation.npy").unlink()
    with pytest.raises(ConfigError, match="no vectors of 'validation' at"):
        tasks.create("tagging", vectors=path)
    with pytest.raises(ConfigError, match="no vectors of 'train' at nowhere"):
        tasks.create("tagging", vectors="nowhere")
    for content in (b"", b"PK\3\4garbage"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"no vectors of 'train' at .*bad.npz \("):
            tasks.create("tagging", vectors=str(tmp_path / "bad.npz"))


def test_majority(task):
    counts = {}
    for word, tag in text("train"):
        counts.setdefault(word, []).append(tag)
    right = 0
    for word, tag in text("test"):
        seen = counts.get(word, ["NOUN"])
        right += tag == max(sorted(set(seen)), key=seen.count)
    assert task.majority("test") == right / len(text("test"))
    assert 0.5 < task.majority("test") < task.majority("train") < 1


def test_what_models_read(task):
    assert task.num_tags == 17
    assert task.metric == "token_error"
    assert list(task.saved_files()) == ["words.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"tagging.length must be at least 1"),
        ({"max_pieces": 2}, r"tagging.max_pieces must be at least 3"),
        ({"max_characters": 2}, r"tagging.max_characters must be at least 3"),
        ({"vectors": "a", "pieces": "b"}, r"vectors or pieces, not both"),
        ({"pieces": "nowhere.txt"}, r"cannot read nowhere.txt"),
        ({"data_dir": "nowhere"}, r"no ud-ewt/en_ewt-ud-train.conllu in nowhere"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("tagging", **options)


def test_on_the_treebank():
    task = tasks.create("tagging", data_dir=real("ud-ewt/en_ewt-ud-train.conllu"))
    assert sum(len(words) for words in task.sentences("train")) == 204_577
    # Which of two equally frequent tags of a word is taken moves these figures by up to 0.04.
    assert abs(100 * task.majority("validation") - 86.13) < 0.05
    assert abs(100 * task.majority("test") - 86.16) < 0.05
