import hashlib
import json
import pathlib
import subprocess
import sys

import pytest

from cope_jax.corpora import wikitext
from cope_jax.errors import ConfigError
from cope_jax.tokenizers.wordpiece import SPECIALS, WordPiece
from tests.corpora.data import real

PIECES = [
    *SPECIALS,
    "play",
    "##ing",
    "##s",
    "un",
    "##want",
    "##ed",
    "want",
    "wa",
    "[",
    "]",
    "cl",
    "##s",
    ",",
    "e",
    "##e",
]
CASES = "tokenizers/published_tokenizer_cases.json"
TRAIN = "from tests.tokenizers.test_wordpiece import sha256, trained; print(sha256(trained(600)))"


@pytest.fixture
def wordpiece():
    return WordPiece(dict.fromkeys(PIECES))


def sha256(wordpiece):
    return hashlib.sha256(wordpiece.text.encode()).hexdigest()


def trained(size):
    documents = wikitext.documents(None, "train")
    return WordPiece.train((" ".join(words) for document in documents for words in document), size)


def test_longest_piece_first_from_the_left(wordpiece):
    assert (
        wordpiece.decode(wordpiece.encode("UNwantéd, playings"))
        == "un ##want ##ed , play ##ing ##s"
    )


def test_what_cannot_be_split_is_one_unknown_piece(wordpiece):
    assert wordpiece.decode(wordpiece.encode("wantx play")) == "[UNK] play"


def test_words_of_more_than_100_characters_are_unknown(wordpiece):
    assert len(wordpiece.encode("e" * 100)) == 100
    assert wordpiece.encode("e" * 101) == [wordpiece.unknown]


def test_special_pieces_in_a_text_are_text(wordpiece):
    assert wordpiece.decode(wordpiece.encode("[CLS] play")) == "[ cl ##s ] play"
    assert wordpiece.mask not in wordpiece.encode("[MASK][MASK]")
    assert wordpiece.cls not in wordpiece.encode_words(["[CLS]"])[0]


def test_every_word_has_a_first_piece(wordpiece):
    words = ["Plays", "", "want,want", "\u200b", "<unk>", "playing"]
    ids, starts = wordpiece.encode_words(words)
    assert wordpiece.decode(ids) == "play ##s [UNK] want , want [UNK] [UNK] play ##ing"
    assert starts == [0, 2, 3, 6, 7, 8]


def test_words_are_encoded_as_text_is(wordpiece):
    text = "playing plays , unwanted want"
    assert wordpiece.encode_words(text.split())[0] == wordpiece.encode(text)


def test_frames_of_one_and_two(wordpiece):
    assert wordpiece.frame([7, 8]) == ([2, 7, 8, 3], [0, 0, 0, 0])
    assert wordpiece.frame([7, 8], [9]) == ([2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1])


def test_cased_vocabularies_keep_letters():
    wordpiece = WordPiece([*SPECIALS, "Play", "play"], lowercase=False)
    assert wordpiece.decode(wordpiece.encode("Play play PLAY")) == "Play play [UNK]"


def test_loads_what_it_saves(tmp_path, wordpiece):
    path = tmp_path / "vocab.txt"
    path.write_text(wordpiece.text, encoding="utf-8")
    loaded = WordPiece.load(path)
    assert loaded.pieces == wordpiece.pieces
    assert loaded.text == wordpiece.text
    path.write_bytes(wordpiece.text.encode().replace(b"\n", b"\r\n"))
    assert WordPiece.load(path).pieces == wordpiece.pieces


@pytest.mark.parametrize("content", [b"[PAD]\nplay\n", b"[UNK]\nplay\nplay\n", b""])
def test_what_is_no_vocabulary_is_one_clear_line(tmp_path, content):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^in .*vocab\.txt, the vocabulary has ") as error:
        WordPiece.load(tmp_path / "vocab.txt")
    assert "\n" not in str(error.value)


def test_a_piece_that_is_there_twice_is_named_with_its_lines():
    with pytest.raises(
        ConfigError,
        match=r"has 'play' on line 2 and on line 4: fetch the file again \(do not delete",
    ):
        WordPiece(["[UNK]", "play", "##s", "play"])


def test_a_missing_vocabulary_and_missing_special_pieces(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        WordPiece.load(tmp_path / "vocab.txt")
    with pytest.raises(ConfigError, match=r"no piece '\[CLS\]'"):
        WordPiece(["[PAD]", "[UNK]"]).check_specials()


def test_special_pieces_that_are_absent_are_none_and_not_written():
    wordpiece = WordPiece(["[PAD]", "[UNK]", "[CLS]"])
    assert (wordpiece.pad, wordpiece.cls, wordpiece.sep, wordpiece.mask) == (0, 2, None, None)
    with pytest.raises(ConfigError, match=r"no piece '\[SEP\]'"):
        wordpiece.frame([1])


@pytest.mark.slow
def test_training_gives_the_same_vocabulary_in_every_process():
    # Runs differ in the order of hash tables: the pieces that the trainer is told are special keep
    # theirs.
    root = pathlib.Path(__file__).parents[2]
    shas = {
        subprocess.check_output([sys.executable, "-c", TRAIN], cwd=root, text=True).strip()
        for _ in range(2)
    }
    assert shas == {sha256(trained(600))}
    assert (
        sha256(trained(600)) == "04c854216ac7d8ec076d8c9dccf1a10df6869bfe20351fa60251c829305085c9"
    )


def test_a_trained_vocabulary_has_the_specials_first_and_knows_its_text():
    wordpiece = trained(400)
    assert wordpiece.pieces[:5] == SPECIALS
    assert len(wordpiece) <= 400
    assert wordpiece.pieces[5:8] == ("##e", "##t", "##a")  # by falling count
    ids = wordpiece.encode("The lighthouse at Carrow Point was built after a storm .")
    assert wordpiece.unknown not in ids
    assert "lighthouse" in trained(600).pieces


def test_a_vocabulary_without_room_for_the_characters_is_an_error():
    with pytest.raises(
        ConfigError, match=r"has no room for the 3 characters .* set vocab_size to at least 11"
    ):
        WordPiece.train(["abc"], 10)
    assert len(WordPiece.train(["abc"], 11)) == 11


def test_published_cases():
    cases = json.loads(pathlib.Path(real(CASES), CASES).read_text())
    wordpiece = WordPiece(list(dict.fromkeys(cases["vocab_full"])))
    for text, pieces, ids in cases["full"]:
        assert wordpiece.decode(wordpiece.encode(text)).split() == pieces
        assert wordpiece.encode(text) == ids
    for text, pieces in cases["wordpiece"]:
        assert wordpiece.decode(wordpiece.encode(text)).split() == pieces


def test_the_vectors_of_the_released_program():
    folder = pathlib.Path(
        real("tokenizers/bert-base-uncased-vocab.txt", "tokenizers/tokenizer_vectors.json")
    )
    wordpiece = WordPiece.load(folder / "tokenizers/bert-base-uncased-vocab.txt")
    assert sha256(wordpiece) == "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
    assert (wordpiece.pad, wordpiece.unknown, wordpiece.cls, wordpiece.sep, wordpiece.mask) == (
        0,
        100,
        101,
        102,
        103,
    )
    vectors = json.loads((folder / "tokenizers/tokenizer_vectors.json").read_text())
    differ = [
        entry["text"] for entry in vectors if wordpiece.encode(entry["text"]) != entry["bert_ids"]
    ]
    # The one other text is a word of 150 characters: the released program splits words of up to
    # 200.
    assert [max(map(len, text.split())) for text in differ] == [150]
    pair = json.loads((folder / CASES).read_text())["hf_tokenizers_pair"]
    assert wordpiece.frame(wordpiece.encode(pair["a"]), wordpiece.encode(pair["b"])) == (
        pair["ids"],
        pair["type_ids"],
    )
