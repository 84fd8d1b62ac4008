"""Tokenizers of bytes and frequent byte sequences: a closed vocabulary in which no text is unknown.

Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword units", ACL 2016,
describe byte-pair encoding. Radford et al., "Language models are unsupervised multitask learners"
(GPT-2), 2019, apply this to bytes.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError, first_line
from cope_jax.registry import check_tokens
from cope_jax.tokenizers import declared
from cope_jax.tokenizers.characters import encodable
from cope_jax.tokenizers.declared import alphabet

END = "<|endoftext|>"
"""The token between texts, in GPT-2 and in vocabularies that are learned here."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the token between texts in published vocabularies."""

# Texts encoded at a time, because the library's results are many times as large as the tokens.
_CHUNK = 256


@contextlib.contextmanager
def clear_panics() -> Iterator[None]:
    """Turns a panic of the library into a ConfigError."""
    try:
        yield
    except BaseException as error:
        # The panic of Rust is no Exception, and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"the tokenizer fails ({first_line(error)}): give another one") from error


class Bytes:
    r"""A tokenizer whose tokens are the UTF-8 bytes of a text, 0 to 255, and `end`, 256.

    >>> Bytes().encode(["né\n"])[0].tolist()
    [110, 195, 169, 10]
    """

    file = "tokenizer.json"
    end = 256
    divides = True

    def __len__(self) -> int:
        return 257

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(encodable(text).encode(), np.uint8).astype(np.int32) for text in texts
        ]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the bytes. Invalid UTF-8 becomes �; `end` becomes `<|endoftext|>`.

        ConfigError: a token is outside of the vocabulary.
        """
        numbers = check_tokens("bytes", tokens, len(self))
        pieces = (END.encode() if token == self.end else bytes([token]) for token in numbers)
        return b"".join(pieces).decode("utf-8", "replace")

    def lost(self, text: str, tokens: np.ndarray) -> tuple[int, int]:
        del text, tokens
        return 0, 0

    @property
    def text(self) -> str:
        """A `tokenizer.json` without pairs, for any program with the library `tokenizers`."""
        numbers = {character: byte for byte, character in enumerate(alphabet())}
        return BPE.create(numbers | {END: self.end}, []).text


class BPE:
    r"""Byte-pair encoding: merges pairs of neighbouring byte sequences in the order of learning.

    As in GPT-2, a text is first split into words, numbers, runs of other signs, and runs of spaces.
    A word includes the space before the word. Pairs are merged only within these parts. A file may
    contain any other tokenizer of the library `tokenizers`.

    >>> bpe = BPE.train(["low lower lowest\n"] * 2, 261)
    >>> [bpe.decode([token]) for token in bpe.encode(["lower slow"])[0]]
    ['low', 'e', 'r', ' ', 's', 'low']
    """

    file = "tokenizer.json"

    def __init__(self, tokenizer: Any, end: str | None = None):
        """Wraps a `tokenizers.Tokenizer`. `end` names its end token if no token has one of `ENDS`.

        Raises:
          ConfigError: there is no end-of-text token, or numbers are too high.
        """
        # A special token that is spelled out in a text is ordinary text.
        tokenizer.encode_special_tokens = True
        # Dropout of merges would give a text other tokens each time.
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.end_name = next((name for name in (*ENDS, end) if name in vocabulary), "")
        if not self.end_name:
            raise ConfigError(
                f"the tokenizer has no end-of-text token ({', '.join(ENDS)}): name it as eos_token in a "
                "tokenizer_config.json in its folder, or give another tokenizer"
            )
        self.end: int = vocabulary[self.end_name]
        added = tokenizer.get_added_tokens_decoder().get(self.end)
        self._text = None
        if added is not None and not added.special:  # else the name in a text would end the text
            self._text = tokenizer.to_str()  # which stays as it is, because runs keep its digest
            end = type(added)(self.end_name, special=True, normalized=False)
            tokenizer.add_special_tokens([end])
        self._size = max(vocabulary.values()) + 1
        if self._size > 2 * len(vocabulary) + 2**16:  # a model would have a row for each number
            raise ConfigError(
                f"the tokenizer numbers its {len(vocabulary):,} tokens up to {self._size - 1:,}: use lower numbers"
            )

    @classmethod
    def create(
        cls, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], end: str | None = None
    ) -> "BPE":
        """Makes a tokenizer from a vocabulary in GPT-2's spelling of bytes, and from ordered pairs.

        Raises:
          ConfigError: a byte is missing, numbers are not 0, 1, …, or a pair does not fit the
            vocabulary.
        """
        from tokenizers import AddedToken, Tokenizer, models

        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ConfigError(
                f"the vocabulary has wrong numbers: give its tokens the numbers 0 to {len(vocabulary) - 1}, each once"
            )
        missing = [character for character in alphabet() if character not in vocabulary]
        if missing:
            raise ConfigError(
                f"the vocabulary lacks {len(missing)} of the 256 bytes, such as {missing[0]!r}: give a byte-level "
                "vocabulary"
            )
        for first, second in merges:
            for piece in (first, second, first + second):
                if piece not in vocabulary:
                    raise ConfigError(
                        f"the pair {first!r} {second!r} does not fit the vocabulary, which lacks {piece!r}: use the "
                        "two files of one tokenizer"
                    )
        tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
        _split_as_gpt2(tokenizer)
        if END in vocabulary:
            tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        return cls(tokenizer, end)

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "BPE":
        """Learns at most `size` tokens. The same texts give the same vocabulary everywhere.

        Raises:
          ConfigError: `size` has no room for the bytes and `end`.
        """
        from tokenizers import Tokenizer, models, trainers

        if size < 257:
            raise ConfigError(
                f"a byte-level vocabulary of {size} has no room for 256 bytes and {END}: set 257 or more"
            )
        tokenizer = Tokenizer(models.BPE())
        _split_as_gpt2(tokenizer)
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=sorted(alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator((encodable(text) for text in texts), trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return self._size

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        numbers: list[np.ndarray] = []
        for start in range(0, len(texts), _CHUNK):
            chunk = [encodable(text) for text in texts[start : start + _CHUNK]]
            with clear_panics():
                encoded = self._tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
            numbers += [np.array(encoding.ids, np.int32) for encoding in encoded]
        return numbers

    def decode(self, tokens: np.ndarray) -> str:
        """The text of the tokens. Invalid UTF-8, such as a cut character, becomes �.

        ConfigError: a token is outside of the vocabulary.
        """
        numbers = check_tokens("BPE", tokens, len(self))
        with clear_panics():
            return self._tokenizer.decode(numbers.tolist(), skip_special_tokens=False)

    @functools.cached_property
    def divides(self) -> bool:
        return declared.divides(self._tokenizer)

    @functools.cached_property
    def may_change(self) -> str:
        """Names what may change a text in a round trip; "" if each text comes back byte by byte."""
        return declared.may_change(self._tokenizer)

    def lost(self, text: str, tokens: np.ndarray) -> tuple[int, int]:
        if not self.may_change:
            return 0, 0
        written, back = encodable(text), self.decode(tokens)
        return int(written.split() != back.split()), int(written != back)

    @property
    def text(self) -> str:
        return self._text or self._tokenizer.to_str()


def _split_as_gpt2(tokenizer: Any) -> None:
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
