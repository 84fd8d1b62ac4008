"""WordPiece: splits words into pieces of a learned vocabulary. Words of known characters are known.

Schuster and Nakajima, "Japanese and Korean voice search", ICASSP 2012; Devlin et al., "BERT", NAACL
2019.
"""

import collections
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from etils import epath

from cope_jax.errors import ConfigError
from cope_jax.registry import check_tokens
from cope_jax.storage.files import read_text
from cope_jax.tokenizers.characters import encodable

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MAX_ALPHABET = 1000


class WordPiece:
    """Turns text into numbers of pieces, by greedy longest match, as in BERT.

    A text is cleaned, and split at spaces and punctuation. If `lowercase`, letters are first set in
    lowercase and accents are removed. Each word is split from the left into the longest pieces that
    the vocabulary has. Every piece after the first piece of a word is spelled with `##` in front. A
    word that cannot be split, or has more than 100 characters, is `[UNK]`. A special piece that is
    spelled out in a text, such as "[CLS]", is ordinary text.

    Attributes:
      pieces: the vocabulary. The number of a piece is its index in `pieces`.
      lowercase: whether letters are set in lowercase and accents removed.
      pad, unknown, cls, sep, mask: the number of each special piece; None if the vocabulary lacks
        the piece.

    >>> wordpiece = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##s", "."])
    >>> wordpiece.decode(wordpiece.encode("Playing plays. [SEP]"))
    'play ##ing play ##s . [UNK] [UNK] [UNK]'
    """

    def __init__(self, pieces: Iterable[str], *, lowercase: bool = True):
        self.pieces = tuple(pieces)
        self.lowercase = lowercase
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}
        if len(self._numbers) < len(self.pieces):
            numbered = enumerate(self.pieces)
            first, twice = next(line for line in numbered if self._numbers[line[1]] != line[0])
            last = self._numbers[twice]
            raise ConfigError(
                f"the vocabulary has {twice!r} on line {first + 1} and on line {last + 1}: fetch the file again (do "
                "not delete a line, because a line's number is the number of its piece)"
            )
        if "[UNK]" not in self._numbers:
            raise ConfigError(
                "the vocabulary has no piece '[UNK]': give the vocab.txt of a WordPiece model"
            )
        self.unknown = self._numbers["[UNK]"]
        # Any, because callers that need them call `check_specials` first, and then they are int.
        self.pad: Any = self._numbers.get("[PAD]")
        self.cls: Any = self._numbers.get("[CLS]")
        self.sep: Any = self._numbers.get("[SEP]")
        self.mask: Any = self._numbers.get("[MASK]")
        self._tokenizer = _tokenizer(self._numbers, lowercase)
        self._encode_word = functools.lru_cache(maxsize=1 << 18)(self._encode_word_anew)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> "WordPiece":
        """Learns at most `vocab_size` pieces. The same texts give the same vocabulary everywhere.

        Raises:
          ConfigError: `vocab_size` has no room for the special pieces and the characters of the
            texts.

        >>> WordPiece.train(["low lower lowest newer newest"] * 2, 32).pieces[-3:]
        ('newest', 'lower', 'lowest')
        """
        from tokenizers import models, trainers

        tokenizer = _tokenizer({"[UNK]": 0}, lowercase)
        # The trainer takes equal counts, and characters inside words ("##e"), in the order of a
        # hash table: runs would differ. Counted words in a fixed order, with these characters as
        # special pieces, give the same vocabulary in every run.
        counts: collections.Counter[str] = collections.Counter()
        for text in texts:
            normal = tokenizer.normalizer.normalize_str(encodable(text))
            counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
        characters: collections.Counter[str] = collections.Counter()
        for word, count in counts.items():
            for character in word:
                characters[character] += count
        by_count = sorted(characters, key=lambda character: (-characters[character], character))
        alphabet = by_count[:_MAX_ALPHABET]
        least = len(SPECIALS) + 2 * len(alphabet)
        if vocab_size < least:
            raise ConfigError(
                f"a WordPiece vocabulary of {vocab_size} has no room for the {len(alphabet)} characters of the text, "
                f"each alone and inside words: set vocab_size to at least {least}"
            )
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            special_tokens=[*SPECIALS, *(f"##{character}" for character in alphabet)],
            show_progress=False,
        )
        tokenizer.model = models.WordPiece(unk_token="[UNK]")
        lines = (f"{word} " * count for word, count in sorted(counts.items()))
        tokenizer.train_from_iterator(lines, trainer)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        return cls(sorted(vocabulary, key=vocabulary.__getitem__), lowercase=lowercase)

    @classmethod
    def load(cls, path: epath.PathLike, *, lowercase: bool = True) -> "WordPiece":
        """Reads a `vocab.txt`, one piece per line. ConfigError: missing or not a vocabulary."""
        try:
            return cls(read_pieces(path), lowercase=lowercase)
        except ConfigError as error:
            raise ConfigError(f"in {path}, {error}") from error

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def text(self) -> str:
        """The vocabulary as the content of a `vocab.txt`."""
        return "".join(f"{piece}\n" for piece in self.pieces)

    def encode(self, text: str) -> list[int]:
        """Returns the numbers of a text's pieces, without special pieces before and after them."""
        return self._tokenizer.encode(encodable(text), add_special_tokens=False).ids

    def encode_words(self, words: Sequence[str]) -> tuple[list[int], list[int]]:
        """Returns (the numbers of the pieces of words, the index of each word's first piece).

        Every word has at least one piece: a word without visible characters is `[UNK]`, like
        `<unk>`, which corpora write for rare words.

        >>> WordPiece(["[UNK]", "play", "##s"]).encode_words(["Plays", "<unk>", "play"])
        ([1, 2, 0, 1], [0, 2, 3])
        """
        ids: list[int] = []
        starts = []
        for word in words:
            starts.append(len(ids))
            ids += self._encode_word(word)
        return ids, starts

    def frame(
        self, first: Sequence[int], second: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns (`[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`, segments 0 or 1).

        Raises:
          ConfigError: the vocabulary lacks a special piece.
        """
        self.check_specials()
        ids = [self.cls, *first, self.sep]
        segments = [0] * len(ids)
        if second is not None:
            ids += [*second, self.sep]
            segments += [1] * (len(second) + 1)
        return ids, segments

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the pieces, separated by spaces. ConfigError: a number has no piece."""
        numbers = check_tokens("WordPiece", ids, len(self))
        return " ".join(self.pieces[number] for number in numbers)

    def check_specials(self) -> None:
        """ConfigError unless the vocabulary has the special pieces that models like BERT need."""
        for piece in SPECIALS:
            if piece not in self._numbers:
                raise ConfigError(
                    f"the vocabulary has no piece {piece!r}: give the vocab.txt of a BERT model"
                )

    def _encode_word_anew(self, word: str) -> tuple[int, ...]:
        return (self.unknown,) if word == "<unk>" else tuple(self.encode(word)) or (self.unknown,)


def read_pieces(path: epath.PathLike) -> tuple[str, ...]:
    """The lines of a `vocab.txt`, whose lines may end in CR LF, without blank lines at the end.

    Raises:
      ConfigError: the file cannot be read.
    """
    return tuple(line.removesuffix("\r") for line in read_text(path).rstrip("\r\n").split("\n"))


def _tokenizer(numbers: dict[str, int], lowercase: bool) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Nothing is added to the vocabulary, so no string in a text is special anyway; this makes it
    # explicit.
    tokenizer.encode_special_tokens = True
    return tokenizer
