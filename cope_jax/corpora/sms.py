"""The SMS Spam Collection: short messages, ham or spam.

Almeida, Gómez Hidalgo and Yamakami, "Contributions to the study of SMS spam filtering", DocEng
2011.
"""

import dataclasses

from cope_jax.corpora import tables
from cope_jax.corpora.corpus_files import find, read_lines
from cope_jax.errors import ConfigError

LABELS = ("ham", "spam")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message and its label, 0 for ham and 1 for spam, or for the two labels of another file."""

    text: str
    label: int


def read(data_dir: str | None) -> list[Message]:
    """Reads `sms-spam/SMSSpamCollection.tsv`, one `label<tab>text` per line, in the file's order.

    Repeated lines, 403 of the 5,574, are left out, so that no test message is also in training.

    Raises:
      ConfigError: the file is missing, a line is malformed, or one of the labels has no message.

    >>> messages = read(None)
    >>> LABELS[messages[0].label], messages[0].text
    ('ham', 'On my way, the bus was late again. Save me a seat?')
    """
    path = find(data_dir, "sms-spam", ["SMSSpamCollection.tsv", "SMSSpamCollection"])
    messages = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t")
        if label not in LABELS or not tab:
            raise ConfigError(
                f"{path}, line {number}: expected 'ham' or 'spam', a tab and a text; fix the line"
            )
        messages.append(Message(text, LABELS.index(label)))
    if {message.label for message in messages} != {0, 1}:
        raise ConfigError(
            f"{path} does not have both ham and spam: give a file with messages of both"
        )
    return list(dict.fromkeys(messages))


def read_table(path: str) -> tuple[tuple[str, str], list[Message]]:
    """Reads a `.csv` file with columns `text` and `label`: see `tables.read`. Drops repeated rows.

    Returns (both labels in alphabetical order, the messages).

    Raises:
      ConfigError: there are not two labels, or one text has both.
    """
    label_of: dict[str, str] = {}
    rows = tables.read(path, ("text", "label"))
    labels = sorted({row["label"] for _, row in rows}, key=lambda label: (label.lower(), label))
    if len(labels) != 2:
        first = ", ".join(labels[:4])
        raise ConfigError(
            f"{path} has {len(labels)} different labels ({first}), not 2: give texts of two classes"
        )
    for where, row in rows:
        text, label = row["text"], row["label"]
        if label_of.setdefault(text, label) != label:
            raise ConfigError(
                f"{where} has the text of an earlier row with the other label: remove one of them"
            )
    messages = [Message(text, labels.index(label)) for text, label in label_of.items()]
    return (labels[0], labels[1]), messages
