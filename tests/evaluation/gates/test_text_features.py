"""Features of tokens, of texts with plain features, cut as several tokenizers cut them."""

import numpy as np
import pytest

from cope_jax.evaluation.gates.inspect_text import features, pieces
from cope_jax.tokenizers.byte_level import BPE, Bytes
from cope_jax.tokenizers.word_level import Words

TEXT = "Zwölf Boxer (2.5 m) rannten .\n\nWhy ? So .\n"


def of(parts, name):
    return [piece for piece, has in zip(parts, features(parts)[name], strict=True) if has]


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE.train([TEXT] * 2, 270), Words.train([TEXT])])
def test_pieces_are_the_text(tokenizer):
    (tokens,) = tokenizer.encode([TEXT])
    texts = pieces(tokenizer.decode, tokens)
    assert len(texts) == len(tokens) and "".join(texts) == tokenizer.decode(tokens)


def test_features_of_words():
    words = Words.train([TEXT])
    parts = pieces(words.decode, words.encode([TEXT])[0])
    assert of(parts, "newline") == ["\n", "\n", "\n"]
    assert of(parts, "sentence end") == [" .", " ?", " ."]
    assert of(parts, "punctuation") == [" .", " ?", " ."]
    assert of(parts, "digit") == of(parts, "bracket")[:1] == [" (2.5"]
    assert of(parts, "bracket") == [" (2.5", " m)"]
    assert of(parts, "word start") == ["Zwölf", " Boxer", " (2.5", " m)", " rannten", "Why", " So"]


def test_features_of_bytes():
    parts = pieces(Bytes().decode, Bytes().encode([TEXT])[0])
    assert "".join(of(parts, "word start")) == "ZB25mrWS"
    assert of(parts, "sentence end") == [".", "?", "."], "the point of a number ends no sentence"
    assert of(parts, "bracket") == ["(", ")"] and of(parts, "digit") == ["2", "5"]
    assert len(of(parts, "whitespace")) == sum(map(str.isspace, TEXT))


def test_features_of_parts_of_words():
    parts = ["Light", "house", "s", ' ."', " a", "_b", " e", ".g", ".", " x", '!"']
    assert of(parts, "word start") == ["Light", " a", "_b", " e", ".g", " x"]
    assert of(parts, "sentence end") == [' ."', ".", '!"']
    assert not any(has.any() for has in features(["", ""]).values())


def test_no_text_has_no_piece():
    assert pieces(Bytes().decode, np.zeros(0, np.int32)) == []
