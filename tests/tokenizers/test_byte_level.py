import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_jax.corpora.raw_text import documents
from cope_jax.errors import ConfigError
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.byte_level import BPE, END, Bytes
from cope_jax.tokenizers.word_level import Words
from cope_jax.tokenizers.wordpiece import WordPiece
from tests.corpora.data import real

BPE_600 = BPE.train(documents("wikitext-2", None, "train"), 600)
TOKENIZERS = {"bytes": Bytes(), "bpe": BPE_600}
WORDS, PIECES = Words.train(["a b\n"]), WordPiece(["[UNK]", "play"])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(name, text):
    tokenizer = TOKENIZERS[name]
    (tokens,) = tokenizer.encode([text])
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    assert len(tokens) <= len(text.encode())
    assert tokenizer.end not in tokens
    assert not len(tokens) or (tokens.min() >= 0 and tokens.max() < len(tokenizer))


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_name_of_a_special_token_is_text(tokenizer):
    (tokens,) = tokenizer.encode([f"a{END}b"])
    assert tokenizer.end not in tokens
    assert (
        tokenizer.decode(tokens)
        == f"a{END}b"
        == tokenizer.decode(
            np.concatenate(
                [tokenizer.encode(["a"])[0], [tokenizer.end], tokenizer.encode(["b"])[0]]
            )
        )
    )


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_half_a_character_is_marked_and_half_a_surrogate_is_left_out(tokenizer):
    assert tokenizer.decode(tokenizer.encode(["é"])[0][:1]) in ("�", "é")
    assert tokenizer.decode(tokenizer.encode(["a\ud800b"])[0]) == "ab"


def test_half_a_surrogate_is_left_out_where_a_vocabulary_is_learned():
    texts, whole = ["a\ud800b play"] * 3, ["ab play"] * 3
    assert BPE.train(texts, 262).text == BPE.train(whole, 262).text
    assert Words.train(texts).text == Words.train(whole).text
    assert WordPiece.train(texts, 40).text == WordPiece.train(whole, 40).text
    pieces = WordPiece(["[UNK]", "ab", "play"])
    assert pieces.encode(texts[0]) == pieces.encode_words(["a\ud800b", "play"])[0] == [1, 2]


def test_another_kind_of_tokenizer_is_one_line(tmp_path):
    for call in (lambda: loading.train("wordz", ["a"]), lambda: loading.load("wordz", tmp_path)):
        with pytest.raises(ConfigError, match="unknown tokenizer 'wordz': did you mean 'words'"):
            call()
    with pytest.raises(ConfigError, match=r"learns from a list of texts, got a text: pass \[text"):
        loading.train("bpe", "a text")


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), WORDS, WORDS.vocabulary, PIECES])
@pytest.mark.parametrize("beyond", [None, 0, 43])
def test_a_token_outside_of_the_vocabulary_is_one_clear_line(tokenizer, beyond):
    token = -1 if beyond is None else len(tokenizer) + beyond
    size = len(tokenizer)
    message = rf": token {token} is outside of the vocabulary of {size} tokens; give tokens from 0 to {size - 1}$"
    with pytest.raises(ConfigError, match=message) as error:
        tokenizer.decode(np.array([1, token]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), WORDS, WORDS.vocabulary, PIECES])
@pytest.mark.parametrize(
    "tokens", [[1.5], [1, True], [1, np.True_], "12", 5, None, [[1]], np.ones(1)]
)
def test_what_is_no_list_of_integers_is_no_text(tokenizer, tokens):
    with pytest.raises(ConfigError, match=r": tokens must be a list of integers, got ") as error:
        tokenizer.decode(tokens)
    assert "\n" not in str(error.value)


def test_integers_of_many_bits_are_outside_of_the_vocabulary():
    for token in (2**70, 2**63, -(2**70)):
        with pytest.raises(ConfigError, match=f"token {token} is outside of the vocabulary of 257"):
            Bytes().decode([token])
    assert Bytes().decode([]) == Bytes().decode(iter([])) == ""


def test_bytes_are_their_own_numbers():
    assert Bytes().encode(["né"])[0].tolist() == list("né".encode())
    assert (len(Bytes()), Bytes().end) == (257, 256)
    assert Bytes().decode(np.array([110, 195])) == "n�"


def test_frequent_sequences_are_one_token():
    assert len(BPE_600.encode(["The keeper of the light"])[0]) < 12
    assert len(BPE_600) == 600


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_what_is_saved_loads_again(tmp_path, tokenizer):
    (tmp_path / tokenizer.file).write_text(tokenizer.text, encoding="utf-8")
    text = "The keeper lit\n\n  the lamp – 12 times."
    for path in (tmp_path, tmp_path / tokenizer.file):
        loaded = loading.load("bpe", path)
        assert (loaded.text, len(loaded), loaded.end) == (
            tokenizer.text,
            len(tokenizer),
            tokenizer.end,
        )
        np.testing.assert_array_equal(loaded.encode([text])[0], tokenizer.encode([text])[0])


@pytest.mark.slow
def test_training_gives_the_same_tokens_in_every_process():
    code = "from tests.tokenizers.test_byte_level import BPE_600; print(BPE_600.text)"
    root = pathlib.Path(__file__).parents[2]
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
        for _ in range(2)
    ]
    assert {run.stdout.decode().strip() for run in runs} == {BPE_600.text}


def lossy():
    """Tokenizers that lose something: case, accents, white space, or missing characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    small = Tokenizer.from_str(BPE_600.text)
    small.normalizer = normalizers.Lowercase()
    accents = Tokenizer.from_str(BPE_600.text)
    accents.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    letters = {
        letter: number
        for number, letter in enumerate(["<unk>", "</s>", *map(chr, range(32, 127)), "▁", "\n"])
    }
    metaspace = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    metaspace.pre_tokenizer, metaspace.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = Tokenizer(
        models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "##a": 3}, unk_token="[UNK]")
    )
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    spaces = Tokenizer.from_str(BPE_600.text)
    spaces.normalizer = normalizers.Replace("  ", " ")
    return {
        "small": small,
        "accents": accents,
        "metaspace": metaspace,
        "pieces": pieces,
        "spaces": spaces,
    }


@pytest.mark.parametrize("kind", ["small", "accents", "metaspace", "pieces", "spaces"])
def test_a_tokenizer_that_loses_text_is_one_line(kind, tmp_path):
    lossy()[kind].save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"tokenizer.json loses text \('Aa .* comes back as '.*'\): give a"
    ) as error:
        loading.load("bpe", tmp_path)
    assert "\n" not in str(error.value)


END_FILES = {
    "tokenizer_config.json": {"eos_token": {"content": "<end>", "lstrip": False}},
    "special_tokens_map.json": {"eos_token": "<end>"},
    "config.json": {"eos_token_id": 256},
    "generation_config.json": {"eos_token_id": [256, 3]},
}


@pytest.mark.parametrize("file", END_FILES)
def test_an_end_token_of_any_name_comes_from_the_files_beside(file, tmp_path):
    renamed = BPE_600.text.replace(END, "<end>")
    number = json.loads(renamed)["model"]["vocab"]["<end>"]
    (tmp_path / "tokenizer.json").write_text(renamed, encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=r"no end-of-text token \(.*\): name it as eos_token in a tokenizer_config.json",
    ):
        loading.load("bpe", tmp_path)
    values = json.loads(json.dumps(END_FILES[file]).replace("256", str(number)))
    (tmp_path / file).write_text(json.dumps(values))
    loaded = loading.load("bpe", tmp_path)
    assert (loaded.end, loaded.decode([loaded.end])) == (number, "<end>")
    (tmp_path / "kept").mkdir()
    for name, text in loading.files(loaded).items():
        (tmp_path / "kept" / name).write_text(text, encoding="utf-8")
    again = loading.load("bpe", tmp_path / "kept" / "tokenizer.json")
    assert again.end == number and loading.same(again, loaded)


def test_an_end_token_that_the_vocabulary_lacks_is_none(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE_600.text.replace(END, "<end>"), encoding="utf-8")
    for value in ("<another>", 10**12, -1, None, [], {}, 1.5, True, [[1]]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ConfigError, match="has no end-of-text token"):
            loading.load("bpe", tmp_path)


def test_a_known_end_token_comes_before_the_end_of_a_turn(tmp_path):
    """As in models of chats, whose files name another token beside."""
    (tmp_path / "tokenizer.json").write_text(BPE_600.text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert loading.load("bpe", tmp_path).end == BPE_600.end


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece", "Unigram"])
def test_a_tokenizer_without_a_token_for_what_it_has_not_is_one_line(kind, tmp_path):
    from tokenizers import Tokenizer, models

    pieces = {"</s>": 0, "a": 1}
    model = models.Unigram([(piece, -1.0) for piece in pieces], None) if kind == "Unigram" else None
    Tokenizer(model or getattr(models, kind)(pieces, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(
        ConfigError, match=r"tokenizer.json cannot encode every text \(.*\): give a tokenizer of"
    ) as error:
        loading.load("bpe", tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_bytes_for_what_it_has_not_and_a_space_before_every_text_loads(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    bytes_ = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "A", "a"]
    llama = Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(bytes_)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    llama.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    ends = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    llama.decoder = decoders.Sequence(ends)
    before = Tokenizer.from_str(BPE_600.text)
    before.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for name, tokenizer in (("llama", llama), ("before", before)):
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        loaded = loading.load("bpe", tmp_path / name)
        assert loaded.decode(loaded.encode(["Aé\n 日"])[0]).lstrip() == "Aé\n 日"


def test_a_text_has_the_same_tokens_each_time_although_the_file_has_dropout(tmp_path):
    tokenizer = BPE.train(["low lower lowest slow\n"] * 9, 270)
    content = json.loads(tokenizer.text)
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded, text = loading.load("bpe", tmp_path), "lowest lower slow " * 20
    for _ in range(3):
        np.testing.assert_array_equal(loaded.encode([text])[0], tokenizer.encode([text])[0])


@pytest.mark.parametrize("special", [True, False])
def test_the_name_of_the_end_in_a_text_does_not_end_it(tmp_path, special):
    content = json.loads(BPE_600.text)
    content["added_tokens"][0] |= {"special": special, "normalized": not special}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded, text = loading.load("bpe", tmp_path), f"a{END} b"
    np.testing.assert_array_equal(loaded.encode([text])[0], BPE_600.encode([text])[0])
    assert (
        loaded.end not in loaded.encode([text])[0] and loaded.decode(np.array([loaded.end])) == END
    )
    content["model"]["vocab"] |= {"x": 600, "</s>": 601, "</": 602, "s>": 603}
    content["model"]["merges"] += [["<", "/"], ["s", ">"], ["</", "s>"]]
    content["added_tokens"], content["pre_tokenizer"]["use_regex"] = [], False
    del content["model"]["vocab"][END]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError,
        match=r"tokenizer.json takes the text '</s>' for the end of a text: give a token",
    ):
        loading.load("bpe", tmp_path)


def test_a_number_far_above_the_count_of_tokens_is_refused(tmp_path):
    content = json.loads(BPE_600.text)
    file = tmp_path / "tokenizer.json"
    content["model"]["vocab"]["far"] = 60_000
    file.write_text(json.dumps(content))
    assert len(loading.load("bpe", file)) == 60_001
    content["model"]["vocab"]["far"] = 2**31 - 2
    file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"numbers its \d+ tokens up to 2,147,483,646: use lower numbers"
    ):
        loading.load("bpe", file)


def test_a_pattern_that_never_ends_is_one_line(tmp_path):
    content = json.loads(BPE_600.text)
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = loading.load("bpe", tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer fails \(Onig: .*: give another one$"):
        tokenizer.encode(["a" * 60 + "b"])


def test_a_vocabulary_needs_room_for_bytes():
    with pytest.raises(ConfigError, match=r"vocabulary of 256 has no room for 256 bytes"):
        BPE.train(["a"], 256)


def gpt2_files(
    folder, numbers=None, merges="#version: 0.2\nl o\nlo w\n", names=("encoder.json", "vocab.bpe")
):
    """A tiny vocabulary in the files of GPT-2: bytes, `lo`, `low` and the end."""
    if numbers is None:
        numbers = json.loads(Bytes().text)["model"]["vocab"]
        numbers = {name: number for name, number in numbers.items() if name != END} | {
            "lo": 256,
            "low": 257,
            END: 258,
        }
    (folder / names[0]).write_text(json.dumps(numbers), encoding="utf-8")
    (folder / names[1]).write_text(merges, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "names", [("encoder.json", "vocab.bpe"), ("my-vocab.json", "my-merges.txt")]
)
def test_files_of_gpt2_load(tmp_path, names):
    bpe = loading.load("bpe", gpt2_files(tmp_path, names=names))
    assert bpe.encode(["low lo"])[0].tolist() == [257, 32, 256]
    assert (len(bpe), bpe.end) == (259, 258)


BYTES = {
    name: number
    for name, number in json.loads(Bytes().text)["model"]["vocab"].items()
    if name != END
}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer.json": "{"},
            r"tokenizer.json is not a valid tokenizer.json \(.*: fetch it again$",
        ),
        ({"tokenizer.json": '{"model": {}}'}, r"tokenizer.json is not a valid tokenizer.json \("),
        (
            {"encoder.json": "{}"},
            "has no tokenizer: put tokenizer.json, encoder.json with vocab.bpe, or vocab.json with merges",
        ),
        ({"encoder.json": "{", "vocab.bpe": ""}, r"encoder.json is damaged \(.*: fetch it again$"),
        (
            {"encoder.json": "[1]", "vocab.bpe": ""},
            r"encoder.json is damaged \(it must contain a JSON object",
        ),
        (
            {"encoder.json": '{"a": "b"}', "vocab.bpe": ""},
            "encoder.json does not map tokens to their numbers",
        ),
        (
            {"encoder.json": '{"a": 1}', "vocab.bpe": ""},
            "has wrong numbers: give its tokens the numbers 0 to 0, each once",
        ),
        (
            {"encoder.json": '{"a": 0}', "vocab.bpe": ""},
            "the vocabulary lacks 255 of the 256 bytes, such as 'Ā'",
        ),
        (
            {"encoder.json": json.dumps(BYTES), "vocab.bpe": "l o w\n"},
            "vocab.bpe, line 1 must have two tokens",
        ),
        (
            {"encoder.json": json.dumps(BYTES), "vocab.bpe": "l o\n"},
            "the pair 'l' 'o' does not fit the vocabulary",
        ),
        (
            {"encoder.json": json.dumps(BYTES), "vocab.bpe": ""},
            "the tokenizer has no end-of-text token",
        ),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        loading.load("bpe", tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^there is no tokenizer at .*none: give a tokenizer.json, or a folder with GPT-2's",
    ):
        loading.load("bpe", tmp_path / "none")


def test_gpt2_as_published():
    folder = pathlib.Path(
        real(
            "tokenizers/gpt2-encoder.json", "tokenizers/gpt2-vocab.bpe", "tokenizers/tokenizer_vec"
        )
    )
    bpe = loading.load("bpe", folder / "tokenizers")
    assert (len(bpe), bpe.end) == (50_257, 50_256)
    cases = json.loads((folder / "tokenizers/tokenizer_vectors.json").read_text(encoding="utf-8"))
    texts = [case["text"] for case in cases]
    encoded = bpe.encode(texts)
    assert [tokens.tolist() for tokens in encoded] == [case["gpt2_ids"] for case in cases]
    assert [bpe.decode(tokens) for tokens in encoded] == texts


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": ""}
        ),
        lambda content: content["model"].update(continuing_subword_prefix="##éééééé"),
        lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
        lambda content: content.update(
            decoder={"type": "Strip", "content": "A", "start": 10**9, "stop": 10**9}
        ),
    ],
    ids=["while it is read", "while its pairs are read", "while it encodes", "while it decodes"],
)
def test_a_file_at_which_the_library_panics_is_one_line(change, tmp_path, capfd):
    content = json.loads(BPE_600.text)
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        loading.load("bpe", tmp_path)
    assert "the tokenizer fails (" in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr().err == ""
