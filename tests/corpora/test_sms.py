import pytest

from cope_jax.corpora import sms
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write


def read(folder, text, **options):
    return sms.read(write(folder, "sms-spam/SMSSpamCollection.tsv", text), **options)


def test_labels_texts_and_order(tmp_path):
    found = read(tmp_path, "spam\tWin  now\n\nham\tsee\tyou\nham\t\n")
    assert [(message.label, message.text) for message in found] == [(1, "Win  now"), (0, "see\tyou"), (0, "")]


def test_exact_duplicates_go_and_the_first_stays(tmp_path):
    text = "ham\tok\nspam\tWin\nham\tok\nham\tOk\n"
    assert [message.text for message in read(tmp_path, text)] == ["ok", "Win", "Ok"]
    assert len(read(tmp_path, text, duplicates=True)) == 4


@pytest.mark.parametrize("line", ["eggs\thello", "ham hello", "hello"])
def test_a_malformed_line_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=r"SMSSpamCollection.tsv, line 3: expected 'ham' or 'spam'"):
        read(tmp_path, f"ham\ta\nspam\tb\n{line}\n")


@pytest.mark.parametrize("text", ["", "ham\tonly\n"])
def test_both_labels_are_needed(tmp_path, text):
    with pytest.raises(ConfigError, match="not both ham and spam"):
        read(tmp_path, text)


def test_the_sample_has_both_and_a_duplicate():
    assert len(sms.read(None)) == 58
    assert len(sms.read(None, duplicates=True)) == 59
    assert sum(message.label for message in sms.read(None)) == 22


def test_the_collection_has_its_published_size():
    folder = real("sms-spam/SMSSpamCollection.tsv")
    every, kept = sms.read(folder, duplicates=True), sms.read(folder)
    assert (len(every), sum(message.label for message in every)) == (5_574, 747)
    assert (len(kept), sum(message.label for message in kept)) == (5_171, 653)
