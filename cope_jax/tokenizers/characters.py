"""Turns words into the numbers of their UTF-8 bytes, as in the ELMo of Peters et al.

A word is `BEGIN_WORD bytes END_WORD PADDING …`. The numbers are the same as in `bilm-tf` during
inference: byte b has the number b + 1, and 0 occurs only in padding words.

>>> characters(["né"], max_characters=6).tolist()
[[259, 111, 196, 170, 260, 261]]
"""

from collections.abc import Sequence

import numpy as np

from cope_jax.errors import ConfigError

NUM_CHARACTERS = 262
"""256 bytes, marks of sentences and words, padding within a word, and the 0 of padding words."""
BEGIN_SENTENCE, END_SENTENCE = 257, 258
BEGIN_WORD, END_WORD, PADDING = 259, 260, 261
MAX_CHARACTERS = 50


def characters(words: Sequence[str], max_characters: int = MAX_CHARACTERS) -> np.ndarray:
    """Returns the characters of words, int32 `[n, C]`: marks around the first C − 2 bytes.

    Raises:
      ConfigError: there is no room for a byte between the marks of a word, or `words` is not a list
        of words.
    """
    if max_characters < 3:
        raise ConfigError(
            f"max_characters must be at least 3 (two marks and a byte), got {max_characters}"
        )
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise ConfigError("words must be a list of str: split the text first")
    rows_NC = np.full((len(words), max_characters), PADDING, np.int32)
    rows_NC[:, 0] = BEGIN_WORD
    for row_C, word in zip(rows_NC, words, strict=True):
        encoded = np.frombuffer(encodable(word).encode()[: max_characters - 2], np.uint8)
        end = len(encoded) + 1
        row_C[1:end] = encoded
        row_C[1:end] += 1
        row_C[end] = END_WORD
    return rows_NC


def encodable(text: str) -> str:
    """Leaves out each half of a surrogate pair, which UTF-8 cannot have."""
    return text.encode("utf-8", "ignore").decode()


def sentence_mark(mark: int, max_characters: int = MAX_CHARACTERS) -> np.ndarray:
    """Returns the characters of the word `BEGIN_SENTENCE` or `END_SENTENCE`, int32 `[C]`."""
    return np.array([BEGIN_WORD, mark, END_WORD, *[PADDING] * (max_characters - 3)], np.int32)


def batch_sentences(
    sentences: Sequence[Sequence[str]], max_characters: int = MAX_CHARACTERS, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Adds marks at both ends of sentences, and pads with zeros to a multiple of `multiple`.

    Returns (characters_BLC, lengths_B including the marks), int32.

    >>> rows, lengths = batch_sentences([["a"], []], 3)
    >>> rows[1].tolist(), lengths.tolist()
    ([[259, 257, 260], [259, 258, 260], [0, 0, 0]], [3, 2])
    """
    lengths_B = np.array([len(words) + 2 for words in sentences], np.int32)
    longest = int(lengths_B.max(initial=2))
    rows_BLC = np.zeros((len(sentences), longest + -longest % multiple, max_characters), np.int32)
    for row_LC, words in zip(rows_BLC, sentences, strict=True):
        row_LC[0] = sentence_mark(BEGIN_SENTENCE, max_characters)
        row_LC[1 : len(words) + 1] = characters(words, max_characters)
        row_LC[len(words) + 1] = sentence_mark(END_SENTENCE, max_characters)
    return rows_BLC, lengths_B


def strip_marks(layers_JBLD: np.ndarray, lengths_B: np.ndarray) -> list[np.ndarray]:
    """Removes the vectors of marks from `batch_sentences`; returns `[J, words, D]` by sentence.

    >>> [vectors.shape for vectors in strip_marks(np.zeros((3, 2, 7, 4)), np.array([7, 2]))]
    [(3, 5, 4), (3, 0, 4)]
    """
    return [np.asarray(layers_JBLD[:, row, 1 : length - 1]) for row, length in enumerate(lengths_B)]
