"""SemCor with the senses of the New Oxford American Dictionary: all words of running text.

Miller et al., "A semantic concordance", HLT 1993; Yuan et al., "Semi-supervised word sense disambiguation with neural
models", COLING 2016.
"""

import json
import zlib

from cope_jax.corpora.corpus_files import find, read_lines
from cope_jax.corpora.sense_occurrences import Occurrence
from cope_jax.errors import ConfigError

_TEST_SHARE = 5


def read(data_dir: str | None) -> list[Occurrence]:
    """The occurrences of `semcor-noad/semcor_noad.jsonl`.

    A line is `{"d": document, "t": sentence, "a": [[index, lemma, part of speech, sense], ...]}`. The lemma of an
    occurrence has its part of speech, as in "charge.N". The corpus has no splits of its own: a fifth of the documents,
    which one following from their names alone, is "test".

    Raises:
      ConfigError: no such file, or a malformed line, named by its number.

    >>> [(o.words[o.index], o.lemma, o.sense) for o in read(None)[:2]]
    [('spring', 'spring.N', 'season'), ('walk', 'walk.V', 'go')]
    """
    path = find(data_dir, "semcor-noad", ["semcor_noad.jsonl"])
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            words = tuple(entry["t"].split())
            test = zlib.crc32(entry["d"].encode()) % _TEST_SHARE == 0
            for index, lemma, part, sense in entry["a"]:
                if not 0 <= index < len(words):
                    raise ValueError("index outside the sentence")
                found.append(Occurrence(words, index, f"{lemma}.{part}", str(sense), "test" if test else "train"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: no annotated sentence ({error}); mend the line") from error
    return found
