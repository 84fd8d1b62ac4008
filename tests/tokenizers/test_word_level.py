import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_jax.corpora import wikitext
from cope_jax.corpora.raw_text import documents
from cope_jax.errors import ConfigError
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.word_level import Vocabulary, Words, split

WORDS = Words.train(documents("wikitext-2", None, "train"))


def test_words_are_those_that_perplexities_count():
    text = [word for document in documents("wikitext-2", None, "train") for word in split(document)]
    assert text == wikitext.words(None, "train")
    assert WORDS.text == Vocabulary.build(text).text


def test_every_line_ends_and_the_last_only_where_it_does():
    assert list(split("a  b\n\n c\td\n")) == ["a", "b", "<eos>", "<eos>", "c", "d", "<eos>"]
    assert list(split("a")) == ["a"]
    assert list(split("")) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_tokens_come_back_from_their_text(tokens):
    assert WORDS.encode([WORDS.decode(np.array(tokens, int))])[0].tolist() == tokens


def test_a_text_that_spells_the_end_of_a_line_has_a_word_there():
    words = Words.train(["a <eos> b <unk>\nb <eos>"])
    assert words.vocabulary.words == ("<unk>", "b", "<eos>", "a")
    (tokens,) = words.encode(["a <eos> b <unk>\n<eos>"])
    assert words.decode(tokens) == "a <unk> b <unk>\n<unk>"
    assert tokens.tolist().count(words.end) == 1


def test_unknown_words_and_lines_as_text():
    (tokens,) = WORDS.encode(["The zeppelin\nis\n"])
    assert tokens[1] == WORDS.vocabulary.unknown
    assert WORDS.decode(tokens) == "The <unk>\nis\n"
    assert tokens[-1] == WORDS.end


def test_a_size_is_kept_and_has_room_for_the_end_of_a_line():
    words = Words.train(["a a b b c c d\n"], 4)
    assert words.vocabulary.words == ("<unk>", "a", "b", "<eos>")
    assert Words.train(["a"]).vocabulary.words == ("<unk>", "a", "<eos>")
    with pytest.raises(ConfigError, match="a vocabulary of 2 has no room beyond <unk> and <eos>"):
        Words.train(["a"], 2)


def test_loads_what_it_saves(tmp_path):
    (tmp_path / Words.file).write_text(WORDS.text, encoding="utf-8")
    for path in (tmp_path, tmp_path / Words.file):
        assert loading.load("words", path).text == WORDS.text


def test_a_mark_of_byte_order_is_no_part_of_the_first_word(tmp_path):
    (tmp_path / Words.file).write_text("\ufeff" + WORDS.text, encoding="utf-8")
    assert loading.load("words", tmp_path).text == WORDS.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<unk>\na\n", "the vocabulary lacks '<eos>' for the ends of lines"),
        (b"<eos>\na\n", "must have '<unk>' and each word once"),
        (b"<unk>\n<eos>\na\na\n", "must have '<unk>' and each word once"),
        (b"<unk>\n\xff\n", "line 2 is not UTF-8 text"),
        (None, "cannot read"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "words.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=f"words.txt.*{message}|{message}.*words.txt") as error:
        loading.load("words", tmp_path / "words.txt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("The keeper\nThe keeper\n\n", (0, 0)),
        (" \n = The = \n \n The keeper . \n", (0, 0)),  # as WikiText writes it
        (" keeper . \n The", (0, 0)),  # a piece of such a text
        ("The \n keeper \n = ", (0, 0)),
        (" \n", (0, 0)),
        ("", (0, 0)),
        ("\n", (0, 0)),
        (" The", (0, 1)),
        ("The ", (0, 1)),
        (" ", (0, 1)),
        (" The\nkeeper\n", (0, 1)),
        ("The\nkeeper ", (0, 1)),
        ("\n \n", (0, 1)),
        ("\n = The = \n", (0, 1)),
        (" The \n keeper\n", (0, 1)),
        (" The \nkeeper", (0, 1)),
        ("The keeper \nThe keeper\n", (0, 1)),
        ("The  keeper", (0, 1)),
        ("The\tkeeper", (0, 1)),
        ("The zeppelin", (1, 1)),
        ("The <eos> keeper", (1, 1)),
        ("The <unk>", (0, 0)),
    ],
)
def test_what_words_do_not_give_back(text, lost):
    words = Words(Vocabulary(["<unk>", "<eos>", "The", "keeper", "=", "."]))
    tokens = words.encode([text])[0]
    assert words.lost(text, tokens) == lost
    if lost == (0, 1):
        assert words.decode(tokens) != text
    elif " \n" not in text and lost == (0, 0):
        assert words.decode(tokens) == text
