import pytest

from cope_jax.corpora import conllu
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write

GOOD = """# newdoc id = one
# text = We don't go.
1\tWe\twe\tPRON\tPRP\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
3.1\tever\tever\tADV\tRB\t_\t_\t_\t_\t_
4\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
5\t.\t.\tPUNCT\t.\t_\t4\tpunct\t_\t_


# sent_id = 2
1\t10 000\t10 000\tNUM\tCD\t_\t0\troot\t_\t_
"""


def read(folder, text):
    return conllu.read(write(folder, "ud-ewt/en_ewt-ud-dev.conllu", text), "validation")


def test_words_and_tags_without_ranges_and_empty_nodes(tmp_path):
    first, second = read(tmp_path, GOOD)
    assert first.words == ("We", "do", "n't", "go", ".")
    assert first.tags == ("PRON", "AUX", "PART", "VERB", "PUNCT")
    assert (first.first, second.first) == (True, False)
    assert second.words == ("10 000",)  # a word may have a space in it


def test_a_file_need_not_end_with_a_blank_line(tmp_path):
    assert read(tmp_path, GOOD.rstrip("\n")) == read(tmp_path, GOOD + "\n\n")


@pytest.mark.parametrize(
    ("line", "wrong", "why"),
    [
        (5, "2 do do AUX VBP _ 4 aux _ _", "line 5: 1 columns"),
        (5, "2\tdo\tdo\tAUX", "line 5: 4 columns"),
        (6, "x\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_", "line 6: word x where word 3 is expected"),
        (
            8,
            "4\tgo\tgo\tVB\tVB\t_\t0\troot\t_\t_",
            "line 8: 'VB' is not a universal part of speech",
        ),
        (8, "5\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_", "line 8: word 5 where word 4 is expected"),
        (8, "4\t\tgo\tVERB\tVB\t_\t0\troot\t_\t_", "line 8: the word is empty"),
        pytest.param(
            8, "9" * 5000 + "\tgo" * 9, "line 8: word 9{20} where word 4", id="5,000 digits"
        ),
        (13, "1-2\tcannot\t_\t_\t_\t_\t_\t_\t_\t_", "line 12: the sentence has no words"),
        (13, "2\t10\t10\tNUM\tCD\t_\t0\troot\t_\t_", "line 13: word 2 where word 1 is expected"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line, wrong, why):
    lines = GOOD.split("\n")
    lines[line - 1] = wrong
    with pytest.raises(ConfigError, match=f"en_ewt-ud-dev.conllu, {why}") as error:
        read(tmp_path, "\n".join(lines))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# text = nothing\n\n"])
def test_a_file_without_sentences_is_an_error(tmp_path, text):
    with pytest.raises(ConfigError, match="has no sentence"):
        read(tmp_path, text)


def test_an_unknown_split_lists_the_choices():
    with pytest.raises(ConfigError, match=r"unknown split of ud-ewt 'dev'.*train, validation"):
        conllu.read(None, "dev")


def test_the_sample_has_every_split_and_tag():
    sentences = {split: conllu.read(None, split) for split in conllu.SPLITS}
    assert {split: len(of_split) for split, of_split in sentences.items()} == {
        "train": 28,
        "validation": 6,
        "test": 6,
    }
    assert {tag for sentence in sentences["train"] for tag in sentence.tags} == set(conllu.TAGS)
    assert sum(len(document) for document in conllu.documents(None, "train")) == 28


def test_the_treebank_has_its_published_sizes():
    folder = real("ud-ewt/en_ewt-ud-train.conllu", "ud-ewt/en_ewt-ud-test.conllu")
    treebank = {split: conllu.read(folder, split) for split in conllu.SPLITS}
    assert {split: len(sentences) for split, sentences in treebank.items()} == {
        "train": 12_544,
        "validation": 2_001,
        "test": 2_077,
    }
    assert {
        split: sum(len(sentence.words) for sentence in sentences)
        for split, sentences in treebank.items()
    } == {
        "train": 204_577,
        "validation": 25_147,
        "test": 25_094,
    }
    assert len(conllu.documents(folder, "test")) == 316
