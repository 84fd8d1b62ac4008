"""What commands that compare layers share: several models, context-free vectors, and word senses."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cope_jax.corpora import coarsewsd, semcor, sentences_by_corpus
from cope_jax.corpora.sense_occurrences import Occurrence
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.evaluation.contextual.embedders import ContextFree
from cope_jax.evaluation.contextual.word2vec import Word2VecConfig, train_word2vec
from cope_jax.evaluation.contextual.word_senses import cap
from cope_jax.models.embedder import Embedder, Sentence, check_sentences

CORPORA = {"coarsewsd20": coarsewsd.read, "semcor-noad": semcor.read}
CHUNK = 256
"""Sentences of a step of a progress bar."""

_LARGE = 50_000  # words of a text from which on rare words are left out


def load_models(models: Sequence[str]) -> list[Embedder]:
    """The embedders of a flag, see `pretrained.load`; of two of one kind each has its folder's name beside it.

    Raises:
      ConfigError: there is none, one twice, or no such model.
    """
    if not models or "" in models:
        raise ConfigError('--models names no model: give runs of experiments.train, folders of models, or "minilm"')
    if len(set(models)) < len(models):
        twice = next(model for model in models if models.count(model) > 1)
        raise ConfigError(f"--models names {twice!r} twice: name each model once")
    found: list[Embedder] = [pretrained.load(model) for model in models]
    names = [embedder.name for embedder in found]
    for embedder, name, model in zip(found, names, models, strict=True):
        if names.count(name) > 1:
            embedder.name = f"{name} {Path(model).parent.name}/{Path(model).name}"
    return found


class Progress:
    """An embedder that shows how far it is, and takes `CHUNK` sentences at a time."""

    def __init__(self, embedder: Embedder, doing: str, total: int):
        self.name, self.layers, self._embedder = embedder.name, embedder.layers, embedder
        self._bar = tqdm(total=total, desc=f"{embedder.name}: {doing}", unit="sentence", dynamic_ncols=True)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        found = []
        for start in range(0, len(sentences), CHUNK):
            own = sentences[start : start + CHUNK]
            found += self._embedder(own)
            self._bar.update(len(own))
        return found

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class ContextMean:
    """A word has the mean of its neighbours' static vectors, without its own: v(w_i) = mean_{j≠i} E[w_j].

    It knows which words are around, and neither their order nor the word. Words without a vector count for nothing.

    >>> vectors = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0]), "c": np.array([0.0, 3.0])}
    >>> ContextMean(vectors)([["a", "b", "c"]])[0][0, 0].tolist()
    [0.0, 2.0]
    """

    def __init__(self, vectors: Mapping[str, np.ndarray], name: str = "mean of the context"):
        self.name, self.layers = name, ("static",)
        self._own = ContextFree(vectors, name)

    def __call__(self, sentences: Sequence[Sentence]) -> list[np.ndarray]:
        check_sentences(sentences)
        found = []
        for vectors_1LD in self._own(sentences):
            known_1L1 = vectors_1LD.any(axis=-1, keepdims=True).astype(np.float32)
            count_1L1 = known_1L1.sum(axis=1, keepdims=True) - known_1L1
            others_1LD = vectors_1LD.sum(axis=1, keepdims=True) - vectors_1LD
            # Of a word alone the difference may leave rounding behind, which is no direction.
            found.append(np.where(count_1L1 > 0, others_1LD / np.maximum(count_1L1, 1), 0).astype(np.float32))
        return found


def read(corpus: str, data_dir: str | None, train: int, test: int) -> tuple[list[Occurrence], list[Occurrence]]:
    """The occurrences to learn from and to be tested on, at most so many of each lemma.

    Lemmas with one sense in training are left out, for there is nothing to be told apart.
    """
    occurrences = CORPORA[corpus](data_dir)
    senses: dict[str, set[str]] = {}
    for occurrence in occurrences:
        if occurrence.split == "train":
            senses.setdefault(occurrence.lemma, set()).add(occurrence.sense)
    known = [one for one in occurrences if len(senses.get(one.lemma, ())) > 1]
    found = [
        cap([one for one in known if one.split == split], most) for split, most in (("train", train), ("test", test))
    ]
    if not all(found):
        raise ConfigError(f"{corpus} has no word with two senses in training and in the test: give the whole corpus")
    return found[0], found[1]


def text(data_dir: str | None) -> list[Sentence]:
    """The sentences of WikiText-2's training text."""
    return [
        sentence for document in sentences_by_corpus.documents("wikitext-2", data_dir, "train") for sentence in document
    ]


def read_queries(word: str | None, sentences: str | None) -> list[tuple[Sentence, int]]:
    """Each sentence of the flag, and the place of the word in it.

    Raises:
      ConfigError: a flag is missing, or a sentence has not the word.
    """
    missing = [f"--{name}" for name, value in (("word", word), ("sentences", sentences)) if not value]
    if not word or not sentences:
        raise ConfigError(f"missing {' and '.join(missing)}; see --help, or set --task=senses")
    found: list[tuple[Sentence, int]] = []
    for sentence in filter(None, (part.split() for part in sentences.split("|"))):
        places = [place for place, other in enumerate(sentence) if other.lower() == word.lower()]
        if not places:
            raise ConfigError(f"the sentence {' '.join(sentence)!r} has no word {word!r}: set spaces around the word")
        found.append((sentence, places[0]))
    if not found:
        raise ConfigError("--sentences has no sentence: write some that have the word, with | between them")
    return found


def choose(text: Sequence[Sentence], word: str, most: int, seed: int = 0) -> list[Sentence]:
    """At most so many sentences: half of them, if there are, with the word, the others drawn at random.

    Raises:
      ConfigError: no sentence has the word.
    """
    having = [place for place, sentence in enumerate(text) if word.lower() in map(str.lower, sentence)]
    if not having:
        raise ConfigError(f"the corpus has no word {word!r}: choose a word that occurs in it")
    rng = np.random.default_rng(seed)
    first = rng.permutation(having)[: max(1, most // 2)]
    rest = rng.permutation(np.setdiff1d(np.arange(len(text)), having))[: most - len(first)]
    return [text[place] for place in sorted([*first, *rest])]


def static_vectors(sentences: Sequence[Sentence], epochs: int) -> dict[str, np.ndarray]:
    """word2vec on the sentences; of a small text also of words that occur once."""
    words = sum(map(len, sentences))
    config = Word2VecConfig(epochs=epochs, min_count=5 if words >= _LARGE else 1)
    print(f"word2vec: {epochs} epochs of {words:,} words", file=sys.stderr)
    return train_word2vec(sentences, config)


def plot_path(workdir: Path, kind: str, model: str) -> Path:
    """Where a plot of a model goes.

    >>> plot_path(Path("runs"), "mix", "BERT runs/a b").name
    'mix_BERT_runs_a_b.png'
    """
    return workdir / f"{kind}_{re.sub(r'[^a-zA-Z0-9.-]+', '_', model)}.png"
