"""What tokens are in their text: where words, sentences and lines begin and end, signs, digits, brackets."""

import itertools
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

BRACKETS = frozenset("()[]{}")
_ENDS, _CLOSING = tuple(".!?…"), "\"'”’»)]"


def pieces(decode: Callable[[np.ndarray], str], tokens: np.ndarray) -> list[str]:
    """The text that each token adds to those before it; together they are the text of all.

    Of a character of several tokens the first has what `decode` writes for its part, and the others nothing.

    >>> pieces(lambda tokens: " ".join("abc"[token] for token in tokens), np.array([0, 2, 1]))
    ['a', ' c', ' b']
    """
    ends = [0]
    texts = [decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    for text in texts:
        ends.append(max(ends[-1], len(text)))
    whole = texts[-1] if texts else ""
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


def features(parts: Sequence[str]) -> dict[str, np.ndarray]:
    r"""Whether each piece of a text has each feature, bool `[L]` by name.

    - "word start": its first letter or digit follows neither.
    - "whitespace": it has a space, a tab or the end of a line.
    - "newline": it has the end of a line.
    - "punctuation": beside whitespace it has only signs of Unicode's classes P and S.
    - "sentence end": it ends with ".", "!", "?" or "…", perhaps quotes or brackets behind, and whitespace or the end of
      the text follows. So does what abbreviates, for no more is looked at.
    - "digit": it has a digit.
    - "bracket": it has one of ( ) [ ] { }.

    >>> found = features(["It", " is", " 3", ".", "5", " m", ".", "\n", "So"])
    >>> [np.flatnonzero(found[name]).tolist() for name in ("word start", "sentence end", "punctuation", "digit")]
    [[0, 1, 2, 4, 5, 8], [6], [3, 6], [2, 4]]
    """
    befores = ["", *(part[-1:] for part in parts)]
    for place in range(1, len(befores)):  # behind a piece of nothing stands what stood before it
        befores[place] = befores[place] or befores[place - 1]
    afters = [*("".join(parts[place : place + 4])[:1] for place in range(1, len(parts))), ""]
    rows = {
        "word start": [_starts_word(part, before) for part, before in zip(parts, befores, strict=False)],
        "whitespace": [any(map(str.isspace, part)) for part in parts],
        "newline": ["\n" in part for part in parts],
        "punctuation": [_is_punctuation(part) for part in parts],
        "sentence end": [_ends_sentence(part, after) for part, after in zip(parts, afters, strict=True)],
        "digit": [any(map(str.isdigit, part)) for part in parts],
        "bracket": [not BRACKETS.isdisjoint(part) for part in parts],
    }
    return {name: np.array(row, bool) for name, row in rows.items()}


def _starts_word(part: str, before: str) -> bool:
    return any(now.isalnum() and not last.isalnum() for last, now in zip(f"{before or ' '}{part}", part, strict=False))


def _is_punctuation(part: str) -> bool:
    signs = "".join(part.split())
    return bool(signs) and all(unicodedata.category(sign)[0] in "PS" for sign in signs)


def _ends_sentence(part: str, after: str) -> bool:
    if after and not after.isspace() and not part[-1:].isspace():
        return False
    return part.rstrip().rstrip(_CLOSING).endswith(_ENDS)
