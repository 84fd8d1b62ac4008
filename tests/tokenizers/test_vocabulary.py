import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.tokenizers.word_level import Vocabulary

TEXT = "d b a c b <unk> a b <unk> <unk> <unk>".split()


def test_falling_counts_and_then_the_alphabet():
    assert Vocabulary.build(TEXT).words == ("<unk>", "b", "a", "c", "d")


def test_size_reserved_words_and_rare_ones():
    assert Vocabulary.build(TEXT, 3).words == ("<unk>", "b", "a")
    assert Vocabulary.build(TEXT, reserved=("<S>", "<unk>", "b")).words == (
        "<S>",
        "<unk>",
        "b",
        "a",
        "c",
        "d",
    )
    assert Vocabulary.build(TEXT, min_count=2).words == ("<unk>", "b", "a")


def test_other_words_are_unknown():
    vocabulary = Vocabulary.build(TEXT, reserved=("<S>", "<unk>"))
    numbers = vocabulary.encode(["b", "x", "<unk>", "<S>"])
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [2, 1, 1, 0]
    assert vocabulary.decode(numbers) == "b <unk> <unk> <S>"
    assert "b" in vocabulary
    assert "x" not in vocabulary


def test_loads_what_it_saves(tmp_path):
    vocabulary = Vocabulary.build([*TEXT, "a\u2028b", "é"])
    (tmp_path / "words.txt").write_text(vocabulary.text, encoding="utf-8")
    assert Vocabulary.load(tmp_path / "words.txt").words == vocabulary.words


def test_wrong_sizes_and_files(tmp_path):
    with pytest.raises(ConfigError, match="no room beyond <unk>"):
        Vocabulary.build(TEXT, 1)
    with pytest.raises(ConfigError, match="must have '<unk>' and each word once"):
        Vocabulary(["a"])
    with pytest.raises(ConfigError, match="must have '<unk>' and each word once"):
        Vocabulary(["<unk>", "a", "a"])
    with pytest.raises(ConfigError, match="cannot read"):
        Vocabulary.load(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("<unk>\né\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.txt, line 2 is not UTF-8 text") as error:
        Vocabulary.load(tmp_path / "latin.txt")
    assert "\n" not in str(error.value)


def test_a_text_is_not_a_list_of_words():
    with pytest.raises(ConfigError, match=r"must be a list of words, got the text 'a b': split it"):
        Vocabulary.build(["a", "b"]).encode("a b")
