import pytest

from cope_jax.corpora import sms
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write


def read(folder, text):
    return sms.read(write(folder, "sms-spam/SMSSpamCollection.tsv", text))


def test_labels_texts_and_order(tmp_path):
    messages = read(tmp_path, "spam\tWin  now\n\nham\tsee\tyou\nham\t\n")
    assert [(message.label, message.text) for message in messages] == [
        (1, "Win  now"),
        (0, "see\tyou"),
        (0, ""),
    ]


def test_exact_duplicates_go_and_the_first_stays(tmp_path):
    text = "ham\tok\nspam\tWin\nham\tok\nham\tOk\n"
    assert [message.text for message in read(tmp_path, text)] == ["ok", "Win", "Ok"]


@pytest.mark.parametrize("line", ["eggs\thello", "ham hello", "hello"])
def test_a_malformed_line_is_named(tmp_path, line):
    with pytest.raises(
        ConfigError, match=r"SMSSpamCollection.tsv, line 3: expected 'ham' or 'spam'"
    ):
        read(tmp_path, f"ham\ta\nspam\tb\n{line}\n")


@pytest.mark.parametrize("text", ["", "ham\tonly\n"])
def test_both_labels_are_needed(tmp_path, text):
    with pytest.raises(ConfigError, match="does not have both ham and spam"):
        read(tmp_path, text)


def test_the_sample_has_both():
    assert len(sms.read(None)) == 58
    assert sum(message.label for message in sms.read(None)) == 22


def test_the_collection_has_its_published_size():
    folder = real("sms-spam/SMSSpamCollection.tsv")
    kept = sms.read(folder)
    assert (len(kept), sum(message.label for message in kept)) == (5_171, 653)
