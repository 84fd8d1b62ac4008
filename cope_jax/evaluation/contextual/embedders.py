"""Vectors of words in their sentences, by layer: one interface for static vectors, RNNs, ELMo and BERT.

Every embedder maps sentences to one array `[J, words, D]` each, the lowest of its J layers first. What looks for
neighbours, tells senses apart or probes layers knows this interface and no model.
"""

import abc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.windows import Window, overlapping, pool, whole
from cope_jax.models.elmo import Elmo
from cope_jax.models.rnn_lm import RNNLM
from cope_jax.registry import check_at_least, unknown
from cope_jax.tokenizers.characters import batch_sentences
from cope_jax.tokenizers.vocabulary import Vocabulary
from cope_jax.tokenizers.wordpiece import WordPiece
from cope_jax.typing import Array

Sentence = Sequence[str]
Pooling = Literal["first", "mean"]
LENGTHS = (16, 32, 64, 128, 256)


class Embedder(Protocol):
    """What gives each word of a sentence its vectors.

    Attributes:
      name: for tables and legends.
      layers: names of the J layers, the lowest first.
    """

    name: str
    layers: tuple[str, ...]

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        """Per sentence float32 `[J, words, D]`."""


class ModelEmbedder(abc.ABC):
    """Base of embedders that run a model: windows of similar length go through it together.

    The vector of a word is the mean over the places of its span. Rows are padded to one of a few lengths and batches
    to a power of two, so that few programs are compiled; a vector does not depend on what shares its batch.

    Args:
      name: see `Embedder`.
      layers: see `Embedder`.
      tokens: bound on the places of a batch, padding included; a longer row goes alone.
      lengths: what rows are padded to, ascending; beyond the last, multiples of it.
    """

    def __init__(self, name: str, layers: Sequence[str], *, tokens: int = 4096, lengths: Sequence[int] = LENGTHS):
        check_at_least(1, name, tokens=tokens, lengths=min(lengths, default=0))
        self.name, self.layers = name, tuple(layers)
        self._tokens, self._lengths = tokens, sorted(lengths)

    @abc.abstractmethod
    def windows(self, sentence: Sentence) -> list[Window]:
        """The windows of a sentence, in which each word occurs exactly once among all `words`."""

    @abc.abstractmethod
    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        """`[J, B, L, D]`: all layers. Rows may have further axes; places from `lengths_B` on are padding, of 0."""

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        windows = [(number, window) for number, words in enumerate(sentences) for window in self.windows(words)]
        buckets: dict[int, list[tuple[int, Window]]] = {}
        for number, window in windows:
            buckets.setdefault(self._padded(len(window.row)), []).append((number, window))
        results: list[Any] = [None] * len(sentences)
        for length, members in sorted(buckets.items()):
            most = _power_of_two_below(max(1, self._tokens // length))
            for start in range(0, len(members), most):
                self._run(members[start : start + most], length, sentences, results)
        return results

    def _run(
        self, members: Sequence[tuple[int, Window]], length: int, sentences: Sequence[Sentence], results: list[Any]
    ) -> None:
        first = members[0][1].row
        rows = np.zeros((_power_of_two_above(len(members)), length, *first.shape[1:]), first.dtype)
        lengths = np.ones(len(rows), np.int32)  # of the rows that only fill the batch: none may be empty
        for place, (_, window) in enumerate(members):
            rows[place, : len(window.row)] = window.row
            lengths[place] = len(window.row)
        layers_JBLD = np.asarray(self.forward(rows, lengths), np.float32)
        for place, (number, window) in enumerate(members):
            if results[number] is None:
                shape = (len(layers_JBLD), len(sentences[number]), layers_JBLD.shape[-1])
                results[number] = np.zeros(shape, np.float32)
            results[number][:, window.words] = pool(layers_JBLD[:, place], window.spans)

    def _padded(self, length: int) -> int:
        longest = self._lengths[-1]
        return next((padded for padded in self._lengths if length <= padded), -(-length // longest) * longest)


class RnnEmbedder(ModelEmbedder):
    """The states of a recurrent language model: v_l(w_i) = h_i^l, in one direction or in both.

    Forward states know the words up to i and backward ones those from i on; layer 0 is the embedding. A sentence starts
    with empty states. Peters et al. 2017 (arXiv 1705.00108).

    Args:
      model: see `cope_jax.models.rnn_lm`.
      vocabulary: gives words their numbers.
      name: see `Embedder`.
      options: see `ModelEmbedder`.
    """

    def __init__(self, model: RNNLM, vocabulary: Vocabulary, *, name: str = "rnn", **options: Any):
        super().__init__(name, ("embeddings", *_numbered(model.config.num_layers)), **options)
        self._vocabulary = vocabulary
        self._states = jitted(model, lambda model, tokens, lengths: model.states(tokens, lengths_B=lengths))

    def windows(self, sentence: Sentence) -> list[Window]:
        return [whole(self._vocabulary.encode(sentence))]

    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        return self._states(rows_BL, lengths_B)


class ElmoEmbedder(ModelEmbedder):
    """All layers of a bidirectional LSTM over characters: (x; x), then (forward; backward) of each layer.

    A sentence stands between its two marks, whose vectors are left out, and starts with empty states. Peters et al.
    2018 (arXiv 1802.05365).

    Args:
      model: see `cope_jax.models.elmo`.
      name: see `Embedder`.
      options: see `ModelEmbedder`.
    """

    def __init__(self, model: Elmo, *, name: str = "elmo", **options: Any):
        super().__init__(name, ("words", *_numbered(model.config.num_layers)), **options)
        self._max_characters = model.config.max_characters
        self._layers = jitted(model, lambda model, characters, lengths: model.layers(characters, lengths)[0])

    def windows(self, sentence: Sentence) -> list[Window]:
        rows_1LC, _ = batch_sentences([sentence], self._max_characters)
        return [whole(rows_1LC[0], begin=1, end=1)]

    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        return self._layers(rows_BL, lengths_B)


class BertEmbedder(ModelEmbedder):
    """All layers of a BERT: a word has the vector of its first piece, or the mean over its pieces.

    [CLS] and [SEP] enclose the sentence. One that is too long is cut into windows that overlap by half, and a word
    takes its vector from where it is farthest from a cut. Devlin et al. (arXiv 1810.04805), section 5.3.

    Args:
      model: has `layers(tokens_BL, segments_BL, mask_BL)`, which gives `[J, B, L, D]`, embeddings first, and `config`.
      tokenizer: words to pieces.
      pooling: "first" or "mean".
      max_length: places of a window, [CLS] and [SEP] included; None is what the model was made for.
      name: see `Embedder`.
      options: see `ModelEmbedder`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: WordPiece,
        *,
        pooling: Pooling = "first",
        max_length: int | None = None,
        name: str = "bert",
        **options: Any,
    ):
        if pooling not in get_args(Pooling):
            raise unknown("pooling", pooling, get_args(Pooling))
        tokenizer.check_specials()
        longest = model.config.max_length if max_length is None else min(max_length, model.config.max_length)
        check_at_least(3, name, max_length=longest)
        lengths = [*(length for length in options.pop("lengths", LENGTHS) if length < longest), longest]
        super().__init__(name, ("embeddings", *_numbered(model.config.num_layers)), lengths=lengths, **options)
        self._tokenizer, self._pooling, self._room = tokenizer, pooling, longest - 2

        def layers(model: Any, tokens_BL: Array, lengths_B: Array) -> Array:
            mask_BL = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]
            return model.layers(tokens_BL, jnp.zeros_like(tokens_BL), mask_BL.astype(jnp.int32))

        self._layers = jitted(model, layers)

    def windows(self, sentence: Sentence) -> list[Window]:
        pieces, starts = self._tokenizer.encode_words(sentence)
        of_words = [pieces[i:j][: self._room] for i, j in itertools.pairwise([*starts, len(pieces)])]
        windows = []
        for words, owned in overlapping([len(own) for own in of_words], self._room):
            row, _ = self._tokenizer.frame([piece for word in words for piece in of_words[word]])
            ends = 1 + np.cumsum([0, *(len(of_words[word]) for word in words)])
            spans = np.stack([ends[:-1], ends[:-1] + 1 if self._pooling == "first" else ends[1:]], axis=1)
            places = np.array(owned, np.int64)
            windows.append(Window(np.array(row, np.int32), places, spans[places - words.start]))
        return windows

    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        return self._layers(rows_BL, lengths_B)


def jitted(model: nnx.Module, function: Any) -> Any:
    """The compiled `function(model, *arrays)` as a function of the arrays; parameters are arguments, not constants."""
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, *arrays: function(nnx.merge(graph, state), *arrays))
    return lambda *arrays: compiled(state, *arrays)


def embed(
    embedder: Embedder, sentences: Sequence[Sentence], *, chunk: int = 256, label: str | None = None
) -> Iterator[np.ndarray]:
    """The vectors `[J, words, D]` of each sentence, of which only `chunk` are held at a time.

    Args:
      embedder: gives the vectors.
      sentences: words of each.
      chunk: sentences that are embedded together.
      label: stands before a progress bar; None: there is none.
    """
    options = {"unit": "sentence", "dynamic_ncols": True, "disable": label is None}
    with tqdm(total=len(sentences), desc=f"{embedder.name}: {label}", **options) as bar:
        for start in range(0, len(sentences), chunk):
            found = embedder(sentences[start : start + chunk])
            yield from found
            bar.update(len(found))


def occurrence_vectors(
    embedder: Embedder,
    sentences: Sequence[Sentence],
    places: Sequence[int],
    *,
    dtype: Any = np.float32,
    label: str | None = None,
) -> np.ndarray:
    """The vectors `[N, J, D]` of one word in each of N sentences.

    A sentence that comes several times is embedded once; `label` is that of `embed`.
    """
    for number, (sentence, place) in enumerate(zip(sentences, places, strict=True)):
        if not 0 <= place < len(sentence):
            raise ConfigError(f"occurrence {number} is word {place} of a sentence of {len(sentence)} words")
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, sentence in enumerate(sentences):
        numbers.setdefault(tuple(sentence), []).append(number)
    found = np.zeros((len(sentences), 0, 0), dtype)
    for own, layers_JLD in zip(numbers.values(), embed(embedder, list(numbers), label=label), strict=True):
        if not found.size:
            found = np.zeros((len(sentences), len(layers_JLD), layers_JLD.shape[-1]), dtype)
        for number in own:
            found[number] = layers_JLD[:, places[number]]
    return found


def check_sentences(sentences: Sequence[Sentence]) -> None:
    """Raises ConfigError for a sentence without words, and for text in place of a list of words."""
    for number, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            raise ConfigError(f"sentence {number} is text, {sentence[:20]!r}: split it into words")
        if not sentence:
            raise ConfigError(f"sentence {number} is empty: leave it out")


def _power_of_two_above(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _power_of_two_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _numbered(layers: int) -> tuple[str, ...]:
    return tuple(f"layer {number}" for number in range(1, layers + 1))
