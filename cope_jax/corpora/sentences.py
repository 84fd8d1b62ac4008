"""Paragraphs into sentences, by rule."""

from collections.abc import Sequence

Sentence = tuple[str, ...]
Document = list[Sentence]

_ENDS = {".", "!", "?"}
_CLOSERS = {")", "]", "''", "”", "’"}


def split_sentences(words: Sequence[str]) -> Document:
    """The sentences of a paragraph of words: each ends with `.`, `!` or `?` and what closes after it.

    A word that begins with a small letter goes on with the sentence. No word is lost.

    >>> split_sentences('He left . " Why ? " she asked . Nobody knew'.split())
    [('He', 'left', '.'), ('"', 'Why', '?', '"', 'she', 'asked', '.'), ('Nobody', 'knew')]
    """
    sentences, start, place, quoted = [], 0, 0, False
    while place < len(words):
        if words[place] == '"':
            quoted = not quoted
        elif words[place] in _ENDS:
            while place + 1 < len(words) and (words[place + 1] in _CLOSERS or (words[place + 1] == '"' and quoted)):
                place += 1
                quoted = quoted and words[place] != '"'
            following = words[place + 1] if place + 1 < len(words) else ""
            if not following[:1].islower() and following not in _ENDS:
                sentences.append(tuple(words[start : place + 1]))
                start = place + 1
        place += 1
    if start < len(words):
        sentences.append(tuple(words[start:]))
    return sentences


def natural(words: Sequence[str]) -> list[str]:
    """Words in which the joints of WikiText are undone.

    >>> natural("a 1 @,@ 250 @.@ 5 m 16 @-@ mile walk".split())
    ['a', '1,250.5', 'm', '16', '-', 'mile', 'walk']
    """
    found: list[str] = []
    joint = ""
    for word in words:
        if word in ("@,@", "@.@"):
            joint += word[1]
        elif joint:
            found[-1:] = ["".join(found[-1:]) + joint + word]
            joint = ""
        else:
            found.append("-" if word == "@-@" else word)
    return [*found, joint] if joint else found
