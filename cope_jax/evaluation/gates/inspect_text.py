"""Scores what gates count in a text: cuts windows, finds features of tokens, and ranks heads."""

import dataclasses
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import head_scores
from cope_jax.tasks import Task
from cope_jax.tasks.stored import TextTask
from cope_jax.tokenizers.tokenizer import Codec

_FEWEST = 16  # minimum number of tokens for a ranking
BRACKETS = frozenset("()[]{}")
_ENDS, _CLOSING = tuple(".!?…"), "\"'”’»)]"


def windows(task: Task, codec: Codec, text: str | None, split: str, count: int) -> np.ndarray:
    """The tokens to inspect, `[B, L]`: the user's text, or at most `count` windows of a split.

    Raises ConfigError if the text is too short or the split is unknown.
    """
    if text is not None:
        tokens_L = np.array([*codec.begin, *codec.read(text, "--input")], np.int32)
        if len(tokens_L) < _FEWEST:
            raise ConfigError(
                f"--input has {len(tokens_L)} tokens: give at least {_FEWEST}, or leave it out"
            )
        return tokens_L[None]
    if isinstance(task, TextTask):  # the entire text, however the run's examples are packed
        texts = [entries.tokens for entries in task.token_streams(split)]
        length = min(task.length(split), max(map(len, texts)))
        parts = [text[: len(text) // length * length].reshape(-1, length) for text in texts]
        # A mixture gives windows of each corpus, in proportion to its size.
        places = np.concatenate([(np.arange(len(rows)) + 0.5) / len(rows) for rows in parts])
        return np.concatenate(parts)[np.argsort(places, kind="stable")[:count]]
    size = task.size(split)
    batch = task.dataset(split, count if size is None else min(count, size))
    whole = batch["weights"].all(axis=1)  # the last window may be padded
    return batch["inputs"][whole] if whole.any() else batch["inputs"]


@dataclasses.dataclass(frozen=True)
class TextGates:
    """The scores of the gates of a model in windows of a text."""

    heads: list[head_scores.HeadScore]  # ranked, see `head_scores.rank`
    bound: float  # the threshold of `head_scores.chance`
    top_tokens: list[str]  # for each head, the tokens with the widest gates, as text
    count: int  # number of tokens inspected
    gates_LHBL: np.ndarray  # the mean gate of each key, by layer and head
    pieces: list[str]  # the text of each key of the first window


def score_text(model: Any, codec: Codec, tokens_BL: np.ndarray) -> TextGates:
    """Ranks the heads of a decoder by how well their gates follow a feature of the text."""
    gates_LHBL = head_scores.mean_gates(model, tokens_BL)
    parts_BL = [pieces(codec.decode, row_L) for row_L in tokens_BL]
    has = [features(parts) for parts in parts_BL]
    words_N = np.array([piece for parts in parts_BL for piece in parts], object)
    tokens_N = tokens_BL.reshape(-1)
    # A token that marks the start of a text does not count, unless it is whitespace, which may also
    # end a line.
    counted_N = ~np.isin(tokens_N, codec.begin) | np.array([word.isspace() for word in words_N])
    gates_LHN = gates_LHBL.reshape(*gates_LHBL.shape[:2], -1)[..., counted_N]
    has_N = {name: np.concatenate([row[name] for row in has])[counted_N] for name in has[0]}
    words_N, tokens_N = words_N[counted_N], tokens_N[counted_N]
    rng = np.random.default_rng(0)
    bound = head_scores.chance(gates_LHN.reshape(-1, gates_LHN.shape[-1]), has_N, rng)
    heads = head_scores.rank(gates_LHN, has_N, tokens_N, rng)
    texts = words_N.tolist()
    gates = (gates_LHN[head.layer, head.head] for head in heads)
    top = [head_scores.top_tokens(gates_N, texts, 3) for gates_N in gates]
    top_tokens = [" ".join(f"{word!r} {gate:.2f}" for word, gate in tokens) for tokens in top]
    return TextGates(heads, bound, top_tokens, len(tokens_N), gates_LHBL, parts_BL[0])


def pieces(decode: Callable[[np.ndarray], str], tokens: np.ndarray) -> list[str]:
    """The text that each token adds to that of the tokens before it; joined, the whole text.

    If a character consists of several tokens, the piece of its first token is the character, and
    all its other pieces are "".

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
    r"""Maps each feature to bool `[L]`: whether each piece of a text has the feature.

    - "word start": the piece has a letter or digit that does not follow a letter or digit.
    - "whitespace": the piece has a space, a tab or the end of a line.
    - "newline": the piece has the end of a line.
    - "punctuation": the piece has characters of Unicode's classes P or S, and no other characters
      except whitespace.
    - "sentence end": the piece ends with ".", "!", "?" or "…", and whitespace or the end of the
      text follows. Closing quotes or brackets may be between. Abbreviations match too.
    - "digit": the piece has a digit.
    - "bracket": the piece has one of ( ) [ ] { }.

    >>> rows = features(["It", " is", " 3", ".", "5", " m", ".", "\n", "So"])
    >>> names = ("word start", "sentence end", "punctuation", "digit")
    >>> [np.flatnonzero(rows[name]).tolist() for name in names]
    [[0, 1, 2, 4, 5, 8], [6], [3, 6], [2, 4]]
    """
    befores = ["", *(piece[-1:] for piece in parts)]
    for index in range(1, len(befores)):  # an empty piece is skipped
        befores[index] = befores[index] or befores[index - 1]
    afters = [*("".join(parts[index : index + 4])[:1] for index in range(1, len(parts))), ""]
    rows = {
        "word start": [
            _starts_word(piece, before) for piece, before in zip(parts, befores, strict=False)
        ],
        "whitespace": [any(map(str.isspace, piece)) for piece in parts],
        "newline": ["\n" in piece for piece in parts],
        "punctuation": [_is_punctuation(piece) for piece in parts],
        "sentence end": [
            _ends_sentence(piece, after) for piece, after in zip(parts, afters, strict=True)
        ],
        "digit": [any(map(str.isdigit, piece)) for piece in parts],
        "bracket": [not BRACKETS.isdisjoint(piece) for piece in parts],
    }
    return {name: np.array(row, bool) for name, row in rows.items()}


def _starts_word(piece: str, before: str) -> bool:
    pairs = zip(f"{before or ' '}{piece}", piece, strict=False)
    return any(now.isalnum() and not last.isalnum() for last, now in pairs)


def _is_punctuation(piece: str) -> bool:
    signs = "".join(piece.split())
    return bool(signs) and all(unicodedata.category(sign)[0] in "PS" for sign in signs)


def _ends_sentence(piece: str, after: str) -> bool:
    if after and not after.isspace() and not piece[-1:].isspace():
        return False
    return piece.rstrip().rstrip(_CLOSING).endswith(_ENDS)
