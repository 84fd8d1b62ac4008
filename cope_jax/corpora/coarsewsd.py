"""CoarseWSD-20: twenty nouns with clearly different senses, in sentences of Wikipedia.

Loureiro et al., "Analysis and evaluation of language models for word sense disambiguation", Computational Linguistics
2021.
"""

from typing import cast, get_args

from cope_jax.corpora.corpus_files import find, read_lines
from cope_jax.corpora.sense_occurrences import Occurrence, Split
from cope_jax.errors import ConfigError

_HEADER = "word\tsplit\tsense\tindex\tsentence"


def read(data_dir: str | None) -> list[Occurrence]:
    """The occurrences of `coarsewsd20/coarsewsd20.tsv`: a header, then word, split, sense, index and sentence by tabs.

    Raises:
      ConfigError: no such file, or a malformed line, named by its number.

    >>> first = read(None)[0]
    >>> first.words[first.index], first.sense
    ('bank', 'bank_river')
    """
    path = find(data_dir, "coarsewsd20", ["coarsewsd20.tsv"])
    header, *lines = read_lines(path) or [""]
    if header != _HEADER:
        raise ConfigError(f"{path}, line 1: the columns must be {_HEADER.split()}; fetch the file again")
    found = []
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        columns = line.split("\t")
        words = tuple(columns[-1].split())
        if len(columns) != 5 or columns[1] not in get_args(Split) or not _inside(columns[3], words):
            raise ConfigError(f"{path}, line {number}: no word, split, sense, index and sentence; mend the line")
        found.append(Occurrence(words, int(columns[3]), columns[0], columns[2], cast(Split, columns[1])))
    return found


def _inside(index: str, words: tuple[str, ...]) -> bool:
    return index.isdecimal() and int(index) < len(words)
