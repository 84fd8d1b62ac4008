"""Reads WikiText-2 and WikiText-103: articles of Wikipedia, split into words.

Merity et al., "Pointer sentinel mixture models", ICLR 2017.
"""

import re
from collections.abc import Sequence

from etils import epath

from cope_jax.corpora.corpus_files import Document, find, first, read_lines
from cope_jax.registry import unknown

EOS = "<eos>"
UNKNOWN = "<unk>"

SPLITS = {"train": "train", "validation": "valid", "test": "test"}
"""A dict from the name of a split to its name in file names."""

_TITLE = re.compile(r"= (?!= ).* =")
_HEADING = re.compile(r"= .* =")
_ENDS = {".", "!", "?"}
_CLOSERS = {")", "]", "''", "”", "’"}


def read(data_dir: str | None, split: str, *, raw: bool = False) -> list[str]:
    """Reads `wikitext-2/wiki.{train,valid,test}.tokens` by line: paragraphs, headings or blank.

    If `raw` is True, reads the `.raw` file if it exists. This file has rare words as written, not
    `<unk>`. Raises ConfigError if there is no such split or file.
    """
    return read_lines(path(data_dir, split, raw=raw))


def path(data_dir: str | None, split: str, *, raw: bool = False) -> epath.Path:
    """The file that `read` reads. Raises ConfigError if there is no such split or file."""
    if split not in SPLITS:
        raise unknown("split of wikitext-2", split, SPLITS)
    stem = f"wiki.{SPLITS[split]}"
    # The second name marks another order of articles.
    tokens = [f"{stem}.tokens", f"{stem}.*.tokens"]
    names = [f"{stem}.raw", *tokens] if raw else tokens
    return find(data_dir, "wikitext-2", names, download="wikitext-2")


def texts(data_dir: str | None, split: str, corpus: str, *, raw: bool = False) -> list[str]:
    r"""Reads the articles of a split, unchanged. Concatenated, they are the file of the split.

    Without a `data_dir`, the built-in sample replaces "wikitext-2" and "wikitext-103". If `raw` is
    True, reads the `.raw` file, which has rare words as written, from the folder `CORPUS-raw` or
    else from the folder `CORPUS`.

    Raises:
      ConfigError: there is no such split or file; the message says where to get the file.

    >>> [text[:12] for text in texts(None, "test", "wikitext-2")]
    [' \n = The Isl', ' = The Wolf ']
    """
    path = None if data_dir is None else _official(data_dir, split, corpus, raw)
    lines = read(None, split) if path is None else read_lines(path)
    articles: list[list[str]] = []
    for line, is_title in zip(lines, _titles(lines), strict=True):
        if not articles or (is_title and any(map(str.strip, articles[-1]))):
            articles.append([])
        articles[-1].append(line)
    return ["".join(f"{line}\n" for line in article) for article in articles]


def _official(data_dir: str, split: str, corpus: str, raw: bool) -> epath.Path:
    if split not in SPLITS:
        raise unknown(f"split of {corpus}", split, SPLITS)
    stem, kind = f"wiki.{SPLITS[split]}", "raw" if raw else "tokens"
    # The second name marks another order of articles.
    names = [f"{stem}.{kind}", f"{stem}.*.{kind}"]
    raw_path = first(data_dir, f"{corpus}-raw", names) if raw else None
    return raw_path or find(data_dir, corpus, names, download=f"{corpus}-raw" if raw else corpus)


def words(data_dir: str | None, split: str) -> list[str]:
    """The words of a split as one text, in which `<eos>` ends every line, even a blank line.

    Published word perplexities of WikiText-2 count these words: 2,088,628 in training, 217,646 in
    validation and 245,569 in the test. The vocabulary has 33,278 different words.

    >>> words(None, "train")[:8]
    ['<eos>', '=', 'The', 'Lighthouse', 'at', 'Carrow', 'Point', '=']
    """
    return [word for line in read(data_dir, split) for word in (*line.split(), EOS)]


def documents(data_dir: str | None, split: str, *, raw: bool = True) -> list[Document]:
    """The articles of a split as sentences of words, without headings, in plain spelling.

    `@-@`, WikiText's hyphen between words, becomes `-`, and `1 @,@ 000` becomes one number.

    The splits of WikiText-2 have 600, 60 and 60 articles.

    >>> " ".join(documents(None, "train")[0][0])
    'The lighthouse at Carrow Point was built after a storm drove three boats onto the rocks .'
    """
    articles: list[Document] = []
    lines = read(data_dir, split, raw=raw)
    for line, is_title in zip(lines, _titles(lines), strict=True):
        if is_title or not articles:  # a text without headings is one article
            articles.append([])
        if line.strip() and not _HEADING.fullmatch(line.strip()):
            articles[-1] += split_sentences(natural(line.split()))
    return [article for article in articles if article]


def _titles(lines: list[str]) -> list[bool]:
    """True for each line that is the title of an article."""
    # Legends of tables have lines that look like titles ("= Played , W ="), but not between blank
    # lines.
    texts = ["", *map(str.strip, lines), ""]
    around = zip(texts, texts[1:-1], texts[2:], strict=False)
    alone = (text if not before and not after else "" for before, text, after in around)
    return [bool(_TITLE.fullmatch(text)) for text in alone]


def split_sentences(words: Sequence[str]) -> Document:
    """The sentences of a paragraph, each up to `.`, `!` or `?` and closing quotes or brackets.

    A sentence continues if the next word begins with a lowercase letter. No word is lost.

    >>> split_sentences('He left . " Why ? " she asked . Nobody knew'.split())
    [('He', 'left', '.'), ('"', 'Why', '?', '"', 'she', 'asked', '.'), ('Nobody', 'knew')]
    """
    sentences, start, index, quoted = [], 0, 0, False
    while index < len(words):
        if words[index] == '"':
            quoted = not quoted
        elif words[index] in _ENDS:
            while index + 1 < len(words) and (
                words[index + 1] in _CLOSERS or (words[index + 1] == '"' and quoted)
            ):
                index += 1
                quoted = quoted and words[index] != '"'
            following = words[index + 1] if index + 1 < len(words) else ""
            if not following[:1].islower() and following not in _ENDS:
                sentences.append(tuple(words[start : index + 1]))
                start = index + 1
        index += 1
    if start < len(words):
        sentences.append(tuple(words[start:]))
    return sentences


def natural(words: Sequence[str]) -> list[str]:
    """Undoes WikiText's separators `@,@`, `@.@` and `@-@`.

    >>> natural("a 1 @,@ 250 @.@ 5 m 16 @-@ mile walk".split())
    ['a', '1,250.5', 'm', '16', '-', 'mile', 'walk']
    """
    joined: list[str] = []
    joint = ""
    for word in words:
        if word in ("@,@", "@.@"):
            joint += word[1]
        elif joint:
            joined[-1:] = ["".join(joined[-1:]) + joint + word]
            joint = ""
        else:
            joined.append("-" if word == "@-@" else word)
    return [*joined, joint] if joint else joined
