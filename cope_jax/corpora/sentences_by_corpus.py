"""Reads the documents of a corpus, by name, as sentences of words, for tasks that learn from unlabelled text."""

from typing import Literal

from cope_jax.corpora import conllu, wikitext
from cope_jax.corpora.corpus_files import Document

Corpus = Literal["wikitext-2", "ud-ewt", "both"]
SPLITS = ("train", "validation", "test")


def documents(corpus: Corpus, data_dir: str | None, split: str) -> list[Document]:
    """The documents of a split. A document is a list of sentences, and a sentence is a tuple of words.

    For "both", WikiText-2 comes first, then UD English EWT. WikiText-2 is read as raw text if `data_dir` has the raw
    training text. Otherwise rare words are `<unk>` in every split, so that a model is tested on the same kind of text
    as it was trained on.

    Raises:
      ConfigError: a file is missing or malformed.

    >>> document = documents("wikitext-2", None, "test")[0]
    >>> len(document), document[0][:4]
    (5, ('The', 'island', 'is', 'flat'))
    """
    found: list[Document] = []
    if corpus != "ud-ewt":
        name = wikitext.path(data_dir, "train", raw=True).name
        found += wikitext.documents(data_dir, split, raw=name.endswith((".raw", ".raw.gz")))
    if corpus != "wikitext-2":
        found += conllu.documents(data_dir, split)
    return found
