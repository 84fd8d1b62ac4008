"""Language modelling of raw text with any tokenizer: predicts each token from those before it.

Golovneva et al., "Contextual Position Encoding" (arXiv 2405.18719), sections 5.4 and 5.5, for
WikiText-103 and code.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from cope_jax.corpora.packing import Mixed, Packed, Packing, TokenStream, join, repeated_pairs
from cope_jax.corpora.raw_text import Mixture, Texts
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.text_units import Counts
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, check_fields, unknown
from cope_jax.storage.files import read_object
from cope_jax.tasks.stored import TextTask
from cope_jax.tasks.task import TASKS, Batch, check
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.tokenizer import Tokenizer


@TASKS.register("text")
class Text(TextTask):
    r"""Predicts every token of a split once. The tokenizer's `end` precedes each document.

    The fields are `inputs`, `targets` and `weights` `[B, L]`. With the packing "stream" an example
    is a window of the entire text. With "documents" an example contains complete documents and
    parts of documents: `segments` `[B, L]` numbers them from 1, with 0 after the last, and
    `positions` `[B, L]` start at 0 in each of them. An `end` that was added after a document is a
    target in training, but does not count in validation and test.

    In a mixture, each training example is sampled from one of the corpora, by weight. The other
    splits contain the examples of all corpora, interleaved evenly, so that a few examples represent
    all corpora.

    With `recall`, batches have a field `repeated` `[B, L]`, float32: 1 where the model can recall the
    target, because the token before it has had the same successor earlier in the window (and
    document), while the pair is rare in the training text. A decoder then also reports the mean
    losses of these targets and of all others, `repeated_loss` and `other_loss`: the "AR hits" of
    Arora et al., "Zoology" (arXiv 2312.04927), and the rest.

    The split `length=512` is the test split in windows of 512 tokens, and `validation/length=512`
    is the validation split in windows of 512 tokens. Any other length is also possible, even if the
    sweep does not have it.

    The headline metric is the perplexity per word; the end of a line counts as a word. For text
    without words, such as code, or if validation or test have unknown words, the headline metric is
    the perplexity per token. Perplexities and bits per byte are computed from the loss and the
    `counts` of the entire split, even if only some of its examples were measured.

    Attributes:
      tokenizer: learned from the training text, or loaded.

    >>> task = Text(Text.Config(tokenizer="words", length=6))
    >>> batch = task.dataset("train", 2)
    >>> task.decode(batch["inputs"][1]), task.decode(batch["targets"][1])
    ('Carrow Point =\n\nThe', 'Point =\n\nThe lighthouse')
    >>> task.counts("test")
    Counts(tokens=120, words=120, bytes=504, unknown=9, changed=2)
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of text.

        Attributes:
          data_dir: folder with a folder for each corpus. If None, the task uses the built-in sample
            or, for "code", the standard library of the running Python.
          corpus: "wikitext-2", "wikitext-103", "wikitext-2-raw", "wikitext-103-raw",
            "tinyshakespeare", "files", "code", or a mixture with weights, such as
            "3*wikitext-2+code"; see `cope_jax.corpora.raw_text`.
          globs: patterns that choose the files of "files" or "code". A pattern is relative to the
            corpus folder, or has a full path. () means all `.txt` and `.txt.gz` files for "files",
            and all `.py` files for "code".
          tokenizer: "bpe", "words" or "bytes". "bpe" is byte-level BPE; "words" splits the text at
            spaces.
          vocab_size: maximum size of a learned vocabulary. None means 8,192 for "bpe", and all
            words for "words".
          vocab: path of a tokenizer to load: a `tokenizer.json`, a folder with this file or with
            GPT-2's files, or for "words" a file with one word per line. If None, the task learns a
            tokenizer from the training text.
          length: L, the number of tokens of an example.
          packing: "stream" or "documents".
          sweep: lengths of the test split for the plot of error by length.
          recall: the largest share of the pairs of neighbours in the training text at which a pair
            is rare, such as 2.5e-5; 0 marks no targets.
        """

        data_dir: str | None = None
        corpus: str = "wikitext-2"
        globs: tuple[str, ...] = ()
        tokenizer: loading.Kind = "bpe"
        vocab_size: int | None = None
        vocab: str | None = None
        length: int = 128
        packing: Packing = "stream"
        sweep: tuple[int, ...] = ()
        recall: float = 0.0

        def __post_init__(self):
            check_fields(self, "text")
            check(0 <= self.recall <= 1, f"text.recall must lie in [0, 1], got {self.recall}")
            check_at_least(1, "text", length=self.length, sweep=min(self.sweep, default=None))
            Mixture(self.corpus, self.data_dir, self.globs)
            check(
                self.tokenizer != "bytes" or self.vocab is None,
                "text.tokenizer='bytes' always has the same 256 tokens: leave vocab out",
            )

    sweep_label = "length of the context"
    packable = True

    def __init__(self, config: Config):
        self._corpora = Mixture(config.corpus, config.data_dir, config.globs)
        self.tokenizer = _tokenizer(config, self._corpora)
        self._texts: dict[str, tuple[list[TokenStream], Counts]] = {}
        self._packed: dict[str, Mixed] = {}
        self.window_length = config.length
        self.crosses_documents = config.packing == "stream"
        lengths = dict.fromkeys(SPLITS, config.length)
        super().__init__(config, vocab_size=len(self.tokenizer), lengths=lengths)
        self.sweep = tuple((length, f"length={length}") for length in sorted(set(config.sweep)))

    @functools.cached_property
    def metric(self) -> str:
        """Perplexity per word or per token. Read on first use: a run works without the text."""
        known = self._corpora.has_words and not any(
            self.counts(split).unknown for split in self.evaluation_splits
        )
        return "perplexity" if known else "token_perplexity"

    def length(self, split: str) -> int:
        return self._parse(split)[1]

    def as_trained(self, split: str) -> bool:
        return self.length(split) == self.config.length

    def sweep_examples(self, n: int) -> dict[str, int]:
        """`n` windows of the longest length; of shorter ones, as many as cover the same text."""
        longest = max((length for length, _ in self.sweep), default=0)
        return {split: n * longest // length for length, split in self.sweep}

    def size(self, split: str) -> int:
        return len(self._examples(split))

    def mixture(self, split: str) -> tuple[tuple[float, range], ...]:
        text, _ = self._parse(split)
        if len(self._corpora.weights) == 1 or text != "train":
            return ()
        return tuple(zip(self._corpora.weights, self._examples(split).ranges, strict=True))

    def take(self, split: str, indices: np.ndarray) -> Batch:
        batch = self._examples(split).take(indices)
        if not self.config.recall:
            return batch
        pairs_BL = self._pairs(batch["inputs"], batch["targets"])
        ends = (np.searchsorted(self._frequent, pairs_BL, side) for side in ("left", "right"))
        rare_BL = np.equal(*ends)
        return {**batch, "repeated": (repeated_pairs(batch) & rare_BL).astype(np.float32)}

    def _pairs(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return first.astype(np.int64) * self.vocab_size + second

    @functools.cached_property
    def _frequent(self) -> np.ndarray:
        """The pairs of the training text that are not rare, sorted."""
        texts = [entries.tokens for entries in self.token_streams("train")]
        pairs = np.concatenate([self._pairs(tokens[:-1], tokens[1:]) for tokens in texts])
        known, counts = np.unique(pairs, return_counts=True)
        return known[counts > self.config.recall * len(pairs)]

    def counts(self, split: str) -> Counts:
        """The `Counts` of a split, without added `end`s that only training predicts."""
        return self._text(self._parse(split)[0])[1]

    def token_streams(self, split: str) -> list[TokenStream]:
        return self._text(self._parse(split)[0])[0]

    def origin(self) -> str:
        source = self._corpora.fingerprint("train")
        number = source["documents"]
        size = f"{number:,} document{'s' * (number != 1)} of {source['bytes']:,} bytes to train on"
        source_line = f"{self.config.corpus} from {self._corpora.place}: {size}"
        return "; ".join(filter(None, (source_line, self.left_out())))

    def data_digest(self) -> dict[str, str]:
        sources = {split: self._corpora.fingerprint(split) for split in SPLITS}
        return {self._SOURCES: json.dumps(sources, indent=1) + "\n"}

    def same_data(self, folder: epath.PathLike, splits: Iterable[str]) -> bool | None:
        file = epath.Path(folder) / self._SOURCES
        if not file.exists():
            return None
        saved = read_object(file, "delete it to skip this check")
        texts = {self._parse(split)[0] for split in splits}
        return all(saved.get(text) == self._corpora.fingerprint(text) for text in texts)

    def example_options(self) -> dict[str, Any]:
        carried = ("data_dir", "globs", "vocab", "vocab_size")
        options = super().example_options()
        return {name: options[name] for name in options if name not in carried}

    @classmethod
    def with_saved_files(cls, options: Mapping[str, Any], folder: epath.PathLike) -> dict[str, Any]:
        loaded = super().with_saved_files(options, folder)
        return loaded if loaded == options else {**loaded, "vocab_size": None}

    def _parse(self, split: str) -> tuple[str, int]:
        """The split of the text and the length of the windows that the name `split` means."""
        if split in SPLITS:
            return split, self.config.length
        text, slash, level = split.rpartition("/")
        axis, _, number = level.partition("=")
        if axis != "length" or (slash and text not in SPLITS):
            raise unknown(
                "split of text", split, (*SPLITS, "length=<number>", "validation/length=<number>")
            )
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"split {split!r} of text has no valid length: use one like 'length=512'"
            )
        return text if slash else "test", int(number)

    def _examples(self, split: str) -> Mixed:
        if split not in self._packed:
            text, length = self._parse(split)
            options = {"packing": self.config.packing, "every": text == "train"}
            parts = [Packed(entries, length, **options) for entries in self.token_streams(split)]
            # Training samples from each part.
            self._packed[split] = Mixed(parts, spread=text != "train")
        return self._packed[split]

    def _text(self, split: str) -> tuple[list[TokenStream], Counts]:
        if split not in self._texts:
            corpora = self._corpora.texts(split)
            encoded = [self.tokenizer.encode(texts) for texts in corpora]
            parts = [join(documents, self.tokenizer.end) for documents in encoded]
            texts = [text for texts in corpora for text in texts]
            lost = map(self.tokenizer.lost, texts, itertools.chain.from_iterable(encoded))
            unknown, changed = map(sum, zip(*lost, strict=True))
            counts = Counts(
                tokens=sum(int(entries.counted.sum()) for entries in parts),
                words=sum(len(text.split()) + text.count("\n") for text in texts),
                bytes=sum(len(text.encode("utf-8", "ignore")) for text in texts),
                unknown=unknown,
                changed=changed,
            )
            self._texts[split] = parts, counts
        return self._texts[split]


def _tokenizer(config: Text.Config, corpora: Mixture) -> Tokenizer:
    if config.vocab is not None:
        return loading.load(config.tokenizer, config.vocab)
    if config.tokenizer not in loading.FILES:
        return loading.train(config.tokenizer, ())
    digest = corpora.fingerprint("train")["sha256"]
    texts = Texts(digest, functools.partial(corpora.documents, "train"))
    return _trained(texts, config.tokenizer, config.vocab_size)


# A command creates the task once per config, and learning takes minutes.
@functools.lru_cache(maxsize=2)
def _trained(texts: Texts, kind: loading.Kind, size: int | None) -> Tokenizer:
    return loading.train(kind, texts.read(), size)
