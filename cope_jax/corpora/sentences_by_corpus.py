"""Reads a corpus as documents of sentences of words, for tasks that learn from unlabelled text."""

from collections.abc import Sequence
from typing import Literal

from cope_jax.corpora import conllu, document_files, wikitext
from cope_jax.corpora.corpus_files import Document
from cope_jax.errors import ConfigError

Corpus = Literal["wikitext-2", "ud-ewt", "both"]
SPLITS = ("train", "validation", "test")


def documents(corpus: Corpus, data_dir: str | None, split: str) -> list[Document]:
    """The documents of a split: lists of sentences, which are tuples of words.

    For "both", WikiText-2 comes first, then UD English EWT. WikiText-2 is read as raw text if
    `data_dir` has the raw training text. Otherwise rare words are `<unk>` in every split, so that a
    model is tested on the same kind of text as it was trained on.

    Raises:
      ConfigError: a file is missing or malformed.

    >>> document = documents("wikitext-2", None, "test")[0]
    >>> len(document), document[0][:4]
    (5, ('The', 'island', 'is', 'flat'))
    """
    result: list[Document] = []
    if corpus != "ud-ewt":
        name = wikitext.path(data_dir, "train", raw=True).name
        result += wikitext.documents(data_dir, split, raw=name.endswith((".raw", ".raw.gz")))
    if corpus != "wikitext-2":
        result += conllu.documents(data_dir, split)
    return result


def by_split(
    corpus: Corpus, data_dir: str | None, files: Sequence[str] = (), splits: Sequence[str] = SPLITS
) -> dict[str, list[Document]]:
    """The `documents` of each of the splits, of a corpus or, if there are any, of `files`.

    `files` are paths or globs: see `document_files`. In text files, blank lines separate documents.
    A line is one sentence or several, with spaces between words: see `wikitext.split_sentences`. A
    hash of each document puts a twentieth of them into validation and a twentieth into the test.

    Raises:
      ConfigError: a file is missing or malformed, or a split of `files` has no document.
    """
    if not files:
        return {split: documents(corpus, data_dir, split) for split in splits}
    documents_of: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for file in document_files.find(files):
        for piece, _ in document_files.pieces(file, division="paragraph"):
            lines = (wikitext.split_sentences(line.split()) for line in piece.text.split("\n"))
            if document := [sentence for sentences in lines for sentence in sentences]:
                documents_of[document_files.split_of(piece.key, 0.05)].append(document)
    for split in splits:
        if not documents_of[split]:
            raise ConfigError(
                f"{', '.join(files)} has no document for {split}: give more, with blank lines between documents"
            )
    return {split: documents_of[split] for split in splits}
