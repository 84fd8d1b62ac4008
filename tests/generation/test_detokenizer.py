"""Text shown while it is drawn: whole characters, no stop texts, in the end every letter once."""

import numpy as np
import pytest

from cope_jax.generation.detokenizer import Continuation
from cope_jax.tokenizers.byte_level import BPE, Bytes
from cope_jax.tokenizers.word_level import Words

TEXT = "A Zwölf 😀 Boxkämpfer – jagen 日本語 \n\nViktor.\n"
TOKENIZERS = {
    "bytes": Bytes(),
    "bpe": BPE.train([TEXT] * 3, 262),
    "words": Words.train([TEXT]),
}


def pieces(row, tokens, size):
    return [
        *(row.add(tokens[start : start + size]) for start in range(0, len(tokens), size)),
        row.finish(),
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_are_the_text_and_none_has_half_a_character(name, size):
    tokenizer = TOKENIZERS[name]
    (tokens,) = tokenizer.encode([TEXT])
    whole = tokenizer.decode(tokens)
    row = Continuation(tokenizer.decode, tokens[:1])
    texts = pieces(row, tokens[1:], size)
    assert tokenizer.decode(tokens[:1]) + "".join(texts) == whole
    assert not any("�" in piece for piece in texts) and row.text == "".join(texts) and not row.ended


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_token_is_decoded_a_few_times_however_long_the_text(name):
    tokenizer, decoded = TOKENIZERS[name], []
    tokens = np.concatenate(tokenizer.encode([TEXT] * 20))

    def decode(tokens):
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    row = Continuation(decode, tokens[:1], stop=["Viktor, "])
    assert (
        "".join(pieces(row, tokens[1:], 2))
        == tokenizer.decode(tokens)[len(tokenizer.decode(tokens[:1])) :]
    )
    assert sum(decoded) < 6 * len(tokens)


def test_a_character_of_tokens_that_are_torn_one_by_one_is_shown_whole():
    # As vocabularies with a token for each byte that is in none: all of them or nothing.
    def decode(tokens):
        data = bytes(tokens.tolist())
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 128 else "�" for byte in data)

    row = Continuation(decode, [65])
    assert [row.add([byte]) for byte in "B日本".encode()] == ["B", "", "", "日", "", "", "本"]
    assert row.finish() == "" and row.text == "B日本"


def test_what_is_no_utf8_is_shown_in_the_end():
    row = Continuation(Bytes().decode, [65])
    assert [row.add([66]), row.add([0xFF]), row.add([67]), row.add([0xE6]), row.finish()] == [
        "B",
        "",
        "�C",
        "",
        "�",
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_text_ends_the_row_and_none_of_it_is_shown(size):
    (tokens,) = Bytes().encode(["one\ntwo\n\n\nthree END"])
    row = Continuation(Bytes().decode, [], stop=["END", "\n\n\n"])
    texts = pieces(row, tokens, size)
    assert "".join(texts) == row.text == "one\ntwo" and row.ended
    assert row.add([65]) == "" == row.finish()


def test_of_stop_texts_that_overlap_the_one_that_is_whole_first_counts():
    for stop, text in ((["abc", "b"], "xa"), (["abc", "bc", "c"], "x"), (["abcd", "bc"], "xa")):
        row = Continuation(Bytes().decode, [], stop=stop)
        assert (row.add(Bytes().encode(["xabcd"])[0]), row.ended) == (text, True)


def test_where_stop_texts_end_a_row_does_not_depend_on_its_pieces(rng):
    ended = 0
    for _ in range(500):
        text = "".join(rng.choice(list("abc"), 12))
        stop = ["".join(rng.choice(list("abc"), size)) for size in rng.integers(1, 5, 2)]
        whole, size = text, 0
        while whole == text and (size := size + 1) <= len(text):
            begins = [size - len(end) for end in stop if text[:size].endswith(end)]
            whole = text[: min(begins, default=len(text))]
        row, tokens = Continuation(Bytes().decode, [65], stop), list(text.encode())
        while tokens:
            cut = rng.integers(1, len(tokens) + 1)
            row.add(tokens[:cut])
            tokens = tokens[cut:]
        row.finish()
        assert (row.text, row.ended) == (whole, any(end in text for end in stop)), (text, stop)
        ended += row.ended
    assert 100 < ended < 500


def test_what_only_begins_like_a_stop_text_comes_late_but_comes():
    row = Continuation(Bytes().decode, [], stop=["ab", "bcd"])
    assert [row.add([byte]) for byte in b"xabd"[:2]] == ["x", ""]
    row = Continuation(Bytes().decode, [], stop=["abc", "bcd"])
    assert [row.add([byte]) for byte in b"xabbce"] == ["x", "", "", "ab", "", "bce"]
    assert row.add(np.array([98, 99])) == "" and row.finish() == "bc" and not row.ended


def test_a_stop_text_in_the_prompt_does_not_count():
    prompt, more = Bytes().encode(["a\n", "\nb"])
    row = Continuation(Bytes().decode, prompt, stop=["\n\n"])
    assert row.add(more) + row.finish() == "\nb" and not row.ended
