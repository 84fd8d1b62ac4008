"""Reads corpora of word senses: CoarseWSD-20 and SemCor."""

import dataclasses
import zlib
from typing import Literal, cast, get_args

from cope_jax.corpora.corpus_files import find, read_lines
from cope_jax.errors import ConfigError
from cope_jax.storage.files import parse_json

Split = Literal["train", "test"]
_HEADER = "word\tsplit\tsense\tindex\tsentence"


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A word in a sentence, with its sense.

    Attributes:
      words: the sentence.
      index: the index of the word in the sentence.
      lemma: the lemma that has the senses, such as "bank", or "charge.N" if parts of speech are
        distinguished.
      sense: a name that is unique only within its lemma.
      split: "train" or "test".
    """

    words: tuple[str, ...]
    index: int
    lemma: str
    sense: str
    split: Split


def read_coarsewsd(data_dir: str | None) -> list[Occurrence]:
    """Reads occurrences of twenty nouns with clearly different senses, in sentences of Wikipedia.

    `coarsewsd20/coarsewsd20.tsv` has a header, then word, split, sense, index and sentence,
    separated by tabs.

    Loureiro et al., "Analysis and evaluation of language models for word sense disambiguation",
    Computational Linguistics 2021.

    Raises:
      ConfigError: the file is missing, or a line is malformed; the message gives the line number.

    >>> first = read_coarsewsd(None)[0]
    >>> first.words[first.index], first.sense
    ('bank', 'bank_river')
    """
    path = find(data_dir, "coarsewsd20", ["coarsewsd20.tsv"])
    header, *lines = read_lines(path) or [""]
    if header != _HEADER:
        raise ConfigError(
            f"{path}, line 1 must name the columns {_HEADER.split()}: fetch the file again"
        )
    occurrences = []
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        columns = line.split("\t")
        words = tuple(columns[-1].split())
        if (
            len(columns) != 5
            or columns[1] not in get_args(Split)
            or not (
                columns[3].isdecimal() and len(columns[3]) < 10 and int(columns[3]) < len(words)
            )
        ):
            raise ConfigError(
                f"{path}, line {number} must have a word, split, sense, index and sentence: fix the line"
            )
        lemma, split, sense, index, _ = columns
        occurrences.append(Occurrence(words, int(index), lemma, sense, cast(Split, split)))
    return occurrences


def read_semcor(data_dir: str | None) -> list[Occurrence]:
    """Reads words of running text, with their senses in the New Oxford American Dictionary.

    A line of `semcor-noad/semcor_noad.jsonl` is
    `{"d": document, "t": sentence, "a": [[index, lemma, part of speech, sense], ...]}`. The lemma
    of an occurrence includes its part of speech, as in "charge.N". The corpus has no published
    splits: "test" is a fifth of the documents, chosen by a hash of their names.

    Miller et al., "A semantic concordance", HLT 1993; Yuan et al., "Semi-supervised word sense
    disambiguation with neural models", COLING 2016.

    Raises:
      ConfigError: the file is missing, or a line is malformed; the message gives the line number.

    >>> [(o.words[o.index], o.lemma, o.sense) for o in read_semcor(None)[:2]]
    [('spring', 'spring.N', 'season'), ('walk', 'walk.V', 'go')]
    """
    path = find(data_dir, "semcor-noad", ["semcor_noad.jsonl"])
    occurrences = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            words = tuple(entry["t"].split())
            test = zlib.crc32(entry["d"].encode()) % 5 == 0
            for index, lemma, word_class, sense in entry["a"]:
                if type(index) is not int or not 0 <= index < len(words):
                    raise ValueError("the index is outside of the sentence")
                if type(sense) not in (str, int, float):
                    raise ValueError(f"the sense {sense!r} is neither text nor a number")
                name, split = f"{lemma}.{word_class}", "test" if test else "train"
                occurrences.append(Occurrence(words, index, name, str(sense), cast(Split, split)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}, line {number} is not an annotated sentence ({error}): fix the line"
            ) from error
    return occurrences


CORPORA = {"coarsewsd20": read_coarsewsd, "semcor-noad": read_semcor}
