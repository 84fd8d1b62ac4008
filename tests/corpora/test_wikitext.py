import itertools

import pytest

from cope_jax.corpora import sentences_by_corpus, wikitext
from cope_jax.corpora.wikitext import natural, split_sentences
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write

TEXT = """ 
 = One = 
 
 Both came . He said , " Go @-@ away ! " and left . 
 = Played , W = 
 
 = = Part = = 
 
 It cost 1 @,@ 000 <unk> . 
 
 = Two = 
 
 = Three = 
 
 . 
"""  # noqa: W291, W293  # the corpus has these blanks


def test_words_have_an_end_for_every_line(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.test.tokens", TEXT)
    words = wikitext.words(folder, "test")
    assert words[:6] == ["<eos>", "=", "One", "=", "<eos>", "<eos>"]
    assert words.count("<eos>") == TEXT.count("\n")
    assert [word for word in words if word != "<eos>"] == TEXT.split()


def test_articles_are_sentences_without_headings_or_empty_articles(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.test.tokens", TEXT)
    first, second = wikitext.documents(folder, "test")
    assert [" ".join(sentence) for sentence in first] == [
        "Both came .",
        'He said , " Go - away ! " and left .',
        "It cost 1,000 <unk> .",
    ]
    assert second == [(".",)]


def test_text_without_headings_is_one_article(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.train.any.tokens", "A b .\n\nC d .\n")
    assert wikitext.documents(folder, "train") == [[("A", "b", "."), ("C", "d", ".")]]


def test_raw_files_come_first_where_asked_for(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.valid.tokens", "a <unk>\n")
    write(tmp_path, "wikitext-2/wiki.valid.raw", "a b\n")
    assert wikitext.read(folder, "validation") == ["a <unk>"]
    assert wikitext.read(folder, "validation", raw=True) == ["a b"]


def test_texts_are_raw_in_all_splits_or_in_none(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.train.tokens", "a <unk>\n")
    write(tmp_path, "wikitext-2/wiki.test.tokens", "c <unk>\n")
    write(tmp_path, "wikitext-2/wiki.test.raw", "c d\n")
    assert sentences_by_corpus.documents("wikitext-2", folder, "test") == [[("c", "<unk>")]]
    write(tmp_path, "wikitext-2/wiki.train.raw", "a b\n")
    assert sentences_by_corpus.documents("wikitext-2", folder, "test") == [[("c", "d")]]


def test_both_corpora_are_one_after_the_other():
    both, *parts = (
        sentences_by_corpus.documents(name, None, "train")
        for name in ("both", "wikitext-2", "ud-ewt")
    )
    assert both == [*parts[0], *parts[1]]


def test_an_unknown_split_lists_the_choices():
    with pytest.raises(ConfigError, match="unknown split of wikitext-2 'valid'"):
        wikitext.words(None, "valid")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("no end", ["no end"]),
        ("Why ? ! he said . So", ["Why ? ! he said .", "So"]),
        ('" One . Two . " Three .', ['" One .', 'Two . "', "Three ."]),
        ('He ( a man . ) left . " Go . "', ["He ( a man . ) left .", '" Go . "']),
        ('" One . " Two . " Three . "', ['" One . "', "Two .", '" Three . "']),
        ("One . ... 2 came .", ["One .", "... 2 came ."]),
    ],
)
def test_sentences_end_where_they_should(text, sentences):
    assert [" ".join(sentence) for sentence in split_sentences(text.split())] == sentences


def test_no_word_is_lost():
    for words in itertools.product(['"', ".", "A", "b", ")"], repeat=5):
        assert [word for sentence in split_sentences(words) for word in sentence] == list(words)


def test_joints_without_a_neighbour_stay():
    assert natural("@,@ 5 @-@ 6 @.@ @,@".split()) == [",5", "-", "6", ".,"]


def test_the_sample_has_articles_in_every_split():
    assert {split: len(wikitext.documents(None, split)) for split in wikitext.SPLITS} == {
        "train": 5,
        "validation": 2,
        "test": 2,
    }


def test_wikitext_has_its_published_sizes():
    folder = real(
        "wikitext-2/wiki.train", "wikitext-2/wiki.valid.tokens", "wikitext-2/wiki.test.tokens"
    )
    words = {split: wikitext.words(folder, split) for split in wikitext.SPLITS}
    assert {split: len(of_split) for split, of_split in words.items()} == {
        "train": 2_088_628,
        "validation": 217_646,
        "test": 245_569,
    }
    kinds = set(words["train"])
    assert len(kinds) == 33_278
    assert kinds >= {*words["validation"], *words["test"]}
    assert [len(wikitext.documents(folder, split, raw=False)) for split in wikitext.SPLITS] == [
        600,
        60,
        60,
    ]
