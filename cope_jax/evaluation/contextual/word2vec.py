"""Static word vectors: trains word2vec, finds similar words, and embeds without context."""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.models.embedder import Sentence, check_sentences
from cope_jax.registry import check_at_least, check_fields, unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word2VecConfig:
    """The options of skip-gram with negative sampling."""

    width: int = 100  # D
    window: int = 5  # maximum distance of a context word
    min_count: int = 5  # rarer words have no vector
    negative: int = 5  # noise words for each true context word
    epochs: int = 5  # passes over the text
    sample: float = 1e-3  # frequency above which words are left out at random
    lowercase: bool = True  # whether "Play" and "play" are one word
    seed: int = 0  # seed of the initial vectors and of all sampling

    def __post_init__(self):
        check_fields(self, "word2vec")
        sizes = {
            "width": self.width,
            "window": self.window,
            "min_count": self.min_count,
            "epochs": self.epochs,
        }
        check_at_least(1, "word2vec", **sizes, negative=self.negative)
        check_at_least(0, "word2vec", sample=self.sample)
        check_at_least(0, "word2vec", 2**63 - 1, seed=self.seed)


def train_word2vec(
    sentences: Sequence[Sequence[str]], config: Word2VecConfig = Word2VecConfig()
) -> dict[str, np.ndarray]:
    """Trains skip-gram vectors; returns float32 `[D]` by word, the most frequent word first.

    Maximises Σ log σ(u_c·v_w) + Σ_noise log σ(−u_n·v_w) over words w, words c in their context, and
    noise words n. Mikolov et al. (arXiv 1310.4546). With one thread and a fixed hash function, the
    same text gives the same vectors in every process. Raises ConfigError if no word occurs
    `min_count` times, or gensim is missing.
    """
    try:
        from gensim.models import Word2Vec
    except ImportError as error:
        raise ConfigError("word2vec needs gensim: run pip install 'cope-jax[text]'") from error
    options = dataclasses.asdict(config)
    width, lowercase = options.pop("width"), options.pop("lowercase")
    text = [list(map(str.lower, words) if lowercase else words) for words in sentences]
    # Python's own hash differs from process to process.
    options["hashfxn"] = lambda word: zlib.crc32(str(word).encode())
    model = Word2Vec(vector_size=width, sg=1, workers=1, **options)
    model.build_vocab(text)
    if not len(model.wv):
        raise ConfigError(
            f"no word occurs {config.min_count} times: give more text, or lower word2vec.min_count"
        )
    model.train(text, total_examples=model.corpus_count, epochs=model.epochs)
    return dict(zip(model.wv.index_to_key, np.asarray(model.wv.vectors, np.float32), strict=True))


def most_similar(
    vectors: Mapping[str, np.ndarray], word: str, count: int = 10
) -> list[tuple[str, float]]:
    """The `count` other words whose vectors have the highest cosine with that of `word`.

    cos(u, v) = u·v / (|u| |v|), and 0 if a vector is 0. If `word` is unknown, its lower-case form
    replaces it.

    >>> most_similar({"a": np.array([1.0, 0.0]), "b": np.array([2.0, 0.0]), "c": np.array([0.0, 1.0])}, "a", 1)
    [('b', 1.0)]
    """
    check_at_least(1, "most_similar", count=count)
    word = word if word in vectors else word.lower()
    if word not in vectors:
        raise unknown("word", word, list(vectors)[:10])
    words = [other for other in vectors if other != word]
    if not words:
        return []
    cosines = normalise(np.stack([vectors[other] for other in words])) @ normalise(vectors[word])
    best = np.argsort(-cosines, kind="stable")[:count]
    return [(words[number], float(cosines[number])) for number in best]


def normalise(vectors: np.ndarray) -> np.ndarray:
    """Divides vectors `[..., D]` by their lengths, in float32; a zero vector stays zero.

    >>> normalise(np.array([[3.0, 4.0], [0.0, 0.0]])).round(6).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    vectors = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


class ContextFree:
    """An embedder that gives a word the same vector in every sentence: v(w | sentence) = E[w].

    A word without a vector gets the vector of its lower-case form. If this form has no vector, the
    word gets zeros. The cosine with a zero vector counts as 0.

    >>> ContextFree({"play": np.array([3.0, 4.0])})([["Play", "on"]])[0].tolist()
    [[[3.0, 4.0], [0.0, 0.0]]]
    """

    def __init__(self, vectors: Mapping[str, np.ndarray], name: str = "context-free"):
        if not vectors:
            raise ConfigError(
                f"{name} has no vectors: train them on text with more words, or lower the minimum count"
            )
        self.name = name
        self.layers: tuple[str, ...] = ("static",)
        self.vectors = vectors
        self._zeros = np.zeros_like(next(iter(vectors.values())), np.float32)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        rows = ([self._vector(word) for word in sentence] for sentence in sentences)
        return [np.stack(vectors).astype(np.float32)[None] for vectors in rows]

    def _vector(self, word: str) -> np.ndarray:
        return (
            self.vectors[word]
            if word in self.vectors
            else self.vectors.get(word.lower(), self._zeros)
        )


class ContextMean(ContextFree):
    """Embeds a word by the mean of the static vectors of the others: v(w_i) = mean_{j≠i} E[w_j].

    The vector depends on the other words, but not on their order or on the word itself. Words
    without a vector are ignored.

    >>> vectors = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0]), "c": np.array([0.0, 3.0])}
    >>> ContextMean(vectors)([["a", "b", "c"]])[0][0, 0].tolist()
    [0.0, 2.0]
    """

    def __init__(self, vectors: Mapping[str, np.ndarray], name: str = "mean of the context"):
        super().__init__(vectors, name)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        means = []
        for vectors_1LD in super().__call__(sentences):
            has_vector_1L1 = vectors_1LD.any(axis=-1, keepdims=True).astype(np.float32)
            count_1L1 = has_vector_1L1.sum(axis=1, keepdims=True) - has_vector_1L1
            others_1LD = vectors_1LD.sum(axis=1, keepdims=True) - vectors_1LD
            # For a single word the difference may be rounding error, which is not a direction.
            means_1LD = others_1LD / np.maximum(count_1L1, 1)
            means.append(np.where(count_1L1 > 0, means_1LD, 0).astype(np.float32))
        return means
