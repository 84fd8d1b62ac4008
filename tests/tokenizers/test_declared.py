"""All types of the library `tokenizers`: those said to keep bytes do; texts have pieces' tokens."""

import itertools
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cope_jax.corpora import document_files
from cope_jax.tokenizers import declared
from cope_jax.tokenizers.byte_level import BPE

LEARNED = Tokenizer.from_str(
    BPE.train(["a few words, 12 of them; ve\u0301ry few.\n\nfew words\n"] * 9, 300).text
)
ALPHABET = declared.alphabet()
NORMALIZERS = {
    "ByteLevel": [normalizers.ByteLevel()],
    "Replace": [normalizers.Replace("``", '"')],
    "Prepend": [normalizers.Prepend("▁")],
    "Precompiled": [],  # needs a table
} | {
    name: [getattr(normalizers, name)()]
    for name in "BertNormalizer Lowercase NFC NFD NFKC NFKD Nmt Strip StripAccents".split()
}
FLAGS = (False, True)
BEHAVIORS = ("isolated", "merged_with_previous", "merged_with_next", "contiguous", "removed")
SPLITTERS = {
    "ByteLevel": [pre_tokenizers.ByteLevel(*given) for given in itertools.product(FLAGS, repeat=3)],
    "CharDelimiterSplit": [pre_tokenizers.CharDelimiterSplit(" ")],
    "FixedLength": [pre_tokenizers.FixedLength(3)],
    "Metaspace": [pre_tokenizers.Metaspace("▁", scheme) for scheme in ("first", "always", "never")],
    "Punctuation": [pre_tokenizers.Punctuation(behavior) for behavior in BEHAVIORS],
    "Split": [
        pre_tokenizers.Split(Regex(r"\s+\S"), behavior, invert)
        for behavior in BEHAVIORS
        for invert in FLAGS
    ],
    "Digits": [pre_tokenizers.Digits(individual) for individual in FLAGS],
} | {
    name: [getattr(pre_tokenizers, name)()]
    for name in "BertPreTokenizer UnicodeScripts Whitespace WhitespaceSplit".split()
}
DECODERS = {
    "Replace": [decoders.Replace("▁", " ")],
    "Strip": [decoders.Strip(" ", 1, 0)],
    "ByteLevel": [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])],
    "Fuse": [decoders.Fuse(), decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])],
} | {
    name: [getattr(decoders, name)()]
    for name in "BPEDecoder ByteFallback CTC Metaspace WordPiece".split()
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t▁é\u0301ﬁ`12'.<"), max_size=40
)


def create(normalizer=None, splitters=(BYTES,), decoder=None, model=None, added=()):
    """A tokenizer with parts of the library, around a learned vocabulary of bytes."""
    tokenizer = Tokenizer.from_str(LEARNED.to_str())
    tokenizer.model = model or tokenizer.model
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters])
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_tokens([*added])
    return BPE(tokenizer)


def variants(parts):
    return [stage for variants in parts.values() for stage in variants]


def everything():
    """Each part of the library, alone and beside a part that turns text to bytes."""
    yield from (create(normalizer) for normalizer in (None, *variants(NORMALIZERS)))
    yield from (create(decoder=decoder) for decoder in variants(DECODERS))
    for splitter in variants(SPLITTERS):
        yield from (
            create(splitters=chain) for chain in ([splitter], [splitter, BYTES], [BYTES, splitter])
        )
        yield create(normalizers.ByteLevel(), [splitter])


ALL = list(everything())
KEEPING = [tokenizer for tokenizer in ALL if not tokenizer.may_change]


def test_each_type_of_the_library_is_here():
    for module, parts in (
        (normalizers, NORMALIZERS),
        (pre_tokenizers, SPLITTERS),
        (decoders, DECODERS),
    ):
        types = {name for name in dir(module) if name[0].isupper()}
        bases = {"Normalizer", "NORMALIZERS", "PreTokenizer", "Decoder", "DecodeStream", "Sequence"}
        assert set(parts) <= types and types - set(parts) <= bases


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_a_tokenizer_that_is_said_to_keep_bytes_gives_each_text_back(text):
    for tokenizer in KEEPING:
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text, tokenizer.text[-900:]


def test_what_may_change_text_is_named():
    assert 40 < len(KEEPING) < len(ALL) / 2
    for name in set(NORMALIZERS) - {"ByteLevel"}:
        assert {create(normalizer).may_change for normalizer in NORMALIZERS[name]} <= {
            f"the normalizer {name}"
        }
    assert create(normalizers.ByteLevel()).may_change == "text that is not turned into bytes once"
    vocabulary = {letter: number for number, letter in enumerate([*ALPHABET, "</s>"])}
    few = {letter: number for number, letter in enumerate([*ALPHABET[:255], "</s>"])}
    for changed, reason in (
        (create(model=models.BPE(few, [])), "the model BPE, which does not have all bytes"),
        (
            create(model=models.BPE(vocabulary, [], end_of_word_suffix="</w>")),
            "the model BPE, which",
        ),
        (create(model=models.WordLevel(vocabulary, "</s>")), "the model WordLevel, which"),
        (create(decoder=decoders.WordPiece()), "the decoder WordPiece"),
        (create(splitters=[pre_tokenizers.Metaspace(), BYTES]), "the pre-tokenizer Metaspace"),
        (create(added=[AddedToken("é", special=False)]), "the added token 'é'"),
        (create(added=[AddedToken("x", lstrip=True)]), "the added token 'x'"),
        (create(added=[AddedToken("  "), AddedToken("word y")]), ""),
    ):
        assert changed.may_change.startswith(reason) and bool(reason) == bool(changed.may_change)


LLAMA = [normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), ()]


def test_the_tokens_of_pieces_are_those_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "PIECE", 64)
    monkeypatch.setattr(document_files, "_AFTER", 32)
    rng = random.Random(0)
    text = "".join(
        rng.choice(["few", "words", " ", " ", "\n", "  ", "\n\n", "12", "é", "'s", "▁", "."])
        for _ in range(600)
    )
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (file,) = document_files.find([str(tmp_path / "a.txt")])
    some = [create(splitters=[splitter]) for splitter in SPLITTERS["ByteLevel"]]
    some += [
        create(splitters=[splitters[0], BYTES])
        for kind, splitters in SPLITTERS.items()
        if kind != "ByteLevel"
    ]
    some += [
        create(added=[AddedToken(token)])
        for token in ("  ", "\n", "w", "few\nwords", "s few", "\n12")
    ]
    several = 0
    for tokenizer in (
        *some,
        create(normalizers.NFC()),
        create(normalizers.Strip()),
        create(*LLAMA),
    ):

        def joins(left, right, encode=tokenizer.encode):
            return np.array_equal(encode([left + right])[0], np.concatenate(encode([left, right])))

        for cut in (None, joins) if tokenizer.divides else (joins,):
            pieces = [piece.text for piece, _ in document_files.pieces(file, joins=cut)]
            assert "".join(pieces) == text
            several += len(pieces) > 5
            np.testing.assert_array_equal(
                np.concatenate(tokenizer.encode(pieces)), tokenizer.encode([text])[0]
            )
    assert several > 5
