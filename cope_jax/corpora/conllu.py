"""Universal Dependencies treebanks in CoNLL-U: words and their universal parts of speech.

Nivre et al., "Universal Dependencies v2", LREC 2020; Silveira et al., "A gold standard dependency
corpus for English", LREC 2014, for the English Web Treebank (EWT), which this module reads.
"""

import dataclasses
import itertools
import re

from etils import epath

from cope_jax.corpora import tables
from cope_jax.corpora.corpus_files import Document, find, read_lines
from cope_jax.corpora.document_files import split_of
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown

TAGS = tuple(
    "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()
)
"""The 17 universal parts of speech, sorted."""

SPLITS = {"train": "train", "validation": "dev", "test": "test"}
"""A dict from the name of a split to its name in file names."""


@dataclasses.dataclass(frozen=True)
class TaggedSentence:
    """A sentence: n syntactic words and n tags. `first` is True if it begins a document."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    first: bool = False


def read(data_dir: str | None, split: str) -> list[TaggedSentence]:
    """Reads the sentences of a split of UD English EWT, `ud-ewt/en_ewt-ud-{train,dev,test}.conllu`.

    Raises:
      ConfigError: the split is unknown, the file is missing, or a line is malformed. The message
        gives the line number.

    >>> sentence = read(None, "train")[0]
    >>> list(zip(sentence.words, sentence.tags))[:3]
    [('The', 'DET'), ('old', 'ADJ'), ('ferry', 'NOUN')]
    """
    if split not in SPLITS:
        raise unknown("split of ud-ewt", split, SPLITS)
    return parse(find(data_dir, "ud-ewt", [f"en_ewt-ud-{SPLITS[split]}.conllu"]))


def documents(data_dir: str | None, split: str) -> list[Document]:
    """The documents of a split. Each is a list of sentences, without the tags.

    >>> [len(document) for document in documents(None, "train")]
    [7, 7, 6, 8]
    """
    result: list[Document] = []
    for sentence in read(data_dir, split):
        if sentence.first or not result:
            result.append([])
        result[-1].append(sentence.words)
    return result


def parse(path: epath.Path) -> list[TaggedSentence]:
    """Reads the sentences of a CoNLL-U file.

    Surface tokens that represent several words (`1-2`) and nodes without a word (`1.1`) are left
    out, as in the published word counts of treebanks.

    Raises:
      ConfigError: a line is malformed, or there is no sentence.
    """
    sentences = []
    for blank, lines in itertools.groupby(
        enumerate(read_lines(path), start=1), lambda entry: not entry[1].strip()
    ):
        block = list(lines)
        if not blank and any(not line.startswith("#") for _, line in block):
            sentences.append(_sentence(block, path))
    if not sentences:
        raise ConfigError(f"{path} has no sentence: give a CoNLL-U file with text")
    return sentences


def read_table(path: str) -> dict[str, list[TaggedSentence]]:
    """Reads sentences by split from a `.csv` file with columns `text`, `label` and perhaps `split`.

    A text has words between spaces, and a label as many tags between spaces; any tags will do.
    Without `split`, a hash of the text puts a tenth of the sentences into validation and a tenth
    into the test.

    Raises:
      ConfigError: the file is no such table, or a split has no sentence. The message gives the
        line.
    """
    sentences_of: dict[str, list[TaggedSentence]] = {split: [] for split in SPLITS}
    for where, row in tables.read(path, ("text", "label"), ("split",)):
        text, tags = row["text"], tuple(row["label"].split())
        words = tuple(text.split())
        if len(words) != len(tags):
            raise ConfigError(
                f"{where} has {len(words)} words and {len(tags)} tags: give each word one tag"
            )
        split = row.get("split", split_of(text, 0.1))
        if split not in sentences_of:
            raise ConfigError(f"{where} has the split {split!r}: choose from {', '.join(SPLITS)}")
        sentences_of[split].append(TaggedSentence(words, tags))
    for split, sentences in sentences_of.items():
        if not sentences:
            raise ConfigError(
                f"{path} has no sentence for {split}: give more, or name splits in a column 'split'"
            )
    return sentences_of


def _sentence(block: list[tuple[int, str]], path: epath.Path) -> TaggedSentence:
    """Parses the numbered lines of one sentence."""
    words: list[str] = []
    tags: list[str] = []
    for number, line in block:
        if line.startswith("#"):
            continue
        columns = line.split("\t")
        reason = ""
        if len(columns) != 10:
            reason = f"{len(columns)} columns separated by tabs where CoNLL-U has 10"
        elif re.fullmatch(r"[0-9]+[-.][0-9]+", columns[0]):
            continue
        elif columns[0] != str(len(words) + 1):
            reason = f"word {columns[0][:20]} where word {len(words) + 1} is expected"
        elif columns[3] not in TAGS:
            reason = f"{columns[3]!r} is not a universal part of speech"
        elif not columns[1].strip():
            reason = "the word is empty"
        if reason:
            raise ConfigError(
                f"{path}, line {number}: {reason}; fix the line or fetch the file again"
            )
        words.append(columns[1])
        tags.append(columns[3])
    if not words:
        raise ConfigError(
            f"{path}, line {block[0][0]}: the sentence has no words; fetch the file again"
        )
    return TaggedSentence(
        tuple(words), tuple(tags), any(line.startswith("# newdoc") for _, line in block)
    )
