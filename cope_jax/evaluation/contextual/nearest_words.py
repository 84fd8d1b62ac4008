"""Finds the nearest neighbours of a word by contextual vectors of layers, and by a static one.

The static vector of "play" has the same neighbours in every sentence. A contextual vector of "play"
can have different neighbours in different sentences. Peters et al. (arXiv 1802.05365), table 4.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.embedders import embed, occurrence_vectors
from cope_jax.evaluation.contextual.word2vec import most_similar, normalise
from cope_jax.evaluation.report.table import MISSING, Table
from cope_jax.models.embedder import Embedder, Sentence
from cope_jax.registry import check_at_least

Words = Literal["any", "same", "other"]
BLOCK = 16384  # rows converted to float32 at a time


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """An occurrence of a word whose vector is near the vector of a query."""

    sentence: tuple[str, ...]  # its words
    place: int  # index of the word in the sentence
    cosine: float  # its cosine with the vector of the query

    @property
    def word(self) -> str:
        return self.sentence[self.place]

    def record(self) -> dict[str, Any]:
        """The fields for JSON."""
        fields = {"word": self.word, "cosine": self.cosine, "place": self.place}
        return {**fields, "sentence": " ".join(self.sentence)}

    def context(self, words: int = 5, mark: str = "*") -> str:
        """The word between two marks, with up to `words` words on each side.

        >>> Neighbour(("he", "saw", "a", "play", "again"), 3, 1.0).context(1)
        '… a *play* again'
        """
        start, stop = max(0, self.place - words), self.place + 1 + words
        before = self.sentence[start : self.place]
        after = self.sentence[self.place + 1 : stop]
        parts = ["…"] * (start > 0) + [*before, f"{mark}{self.word}{mark}", *after]
        return " ".join(parts + ["…"] * (stop < len(self.sentence)))


class OccurrenceIndex:
    """An index of the words of a corpus, with a unit vector for each word and layer, in float16.

    200,000 words with vectors of width 256 in 3 layers take 300 MB. The index has the first
    sentences of the corpus, as many as have at most `max_words` words together. For `label`, see
    `embed`.
    """

    def __init__(
        self,
        embedder: Embedder,
        sentences: Sequence[Sentence],
        *,
        max_words: int = 200_000,
        label: str | None = None,
    ):
        check_at_least(1, "neighbours", max_words=max_words)
        ends = np.cumsum([len(sentence) for sentence in sentences])
        kept = int(np.searchsorted(ends, max_words, side="right"))
        if not kept:
            raise ConfigError(
                f"the corpus has no sentence within max_words={max_words} words: give more text, or raise max_words"
            )
        self.embedder = embedder
        self.sentences = [tuple(sentence) for sentence in sentences[:kept]]
        sizes = enumerate(map(len, self.sentences))
        self._rows = np.array([(s, i) for s, size in sizes for i in range(size)], np.int32)
        self._words = np.array([self.sentences[s][i].lower() for s, i in self._rows])
        vectors = embed(embedder, self.sentences, label=label)
        units = [normalise(own_JLD).astype(np.float16) for own_JLD in vectors]
        self._units_JND = np.concatenate(units, axis=1)

    def __len__(self) -> int:
        """The number of words in the index."""
        return len(self._rows)

    def nearest(
        self,
        sentence: Sentence,
        index: int,
        *,
        count: int = 10,
        words: Words = "any",
        per_word: int | None = None,
    ) -> dict[str, list[Neighbour]]:
        """Finds the occurrences nearest to a word in a sentence by cosine, for each layer.

        The sentence need not be in the corpus. If the corpus contains the sentence, the word is not
        a neighbour of itself.

        Args:
          sentence: the words of the sentence.
          index: the index of the word in the sentence.
          count: number of occurrences for each layer.
          words: "same" or "other" restricts the search to the same word or to other words, ignoring
            case.
          per_word: maximum number of occurrences of the same word. If None, there is no maximum.
        """
        check_at_least(1, "neighbours", count=count, per_word=per_word)
        if words not in ("any", "same", "other"):
            raise ConfigError(f"neighbours.words must be 'any', 'same' or 'other', got {words!r}")
        (query_JD,) = occurrence_vectors(self.embedder, [sentence], [index])
        is_same = self._words == sentence[index].lower()
        allowed = {"any": np.ones_like(is_same), "same": is_same, "other": ~is_same}[words]
        copies = [number for number, other in enumerate(self.sentences) if other == tuple(sentence)]
        allowed = allowed & ~(np.isin(self._rows[:, 0], copies) & (self._rows[:, 1] == index))
        return {
            layer: self._best(units_ND, unit_D, allowed, count, per_word)
            for layer, units_ND, unit_D in zip(
                self.embedder.layers, self._units_JND, normalise(query_JD), strict=True
            )
        }

    def _best(
        self,
        units_ND: np.ndarray,
        unit_D: np.ndarray,
        allowed: np.ndarray,
        count: int,
        per_word: int | None,
    ) -> list[Neighbour]:
        blocks = (units_ND[start : start + BLOCK] for start in range(0, len(units_ND), BLOCK))
        cosines = np.concatenate([block_ND.astype(np.float32) @ unit_D for block_ND in blocks])
        best: list[Neighbour] = []
        seen: dict[str, int] = {}
        for row in np.argsort(-cosines, kind="stable"):
            word = str(self._words[row])
            if len(best) == count:
                break
            if allowed[row] and (per_word is None or seen.get(word, 0) < per_word):
                seen[word] = seen.get(word, 0) + 1
                number, index = map(int, self._rows[row])
                best.append(Neighbour(self.sentences[number], index, float(cosines[row])))
        return best


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The neighbours of a word in several sentences."""

    word: str  # in lowercase
    queries: tuple[Neighbour, ...]  # the word in each sentence, as its own neighbour with cosine 1
    # The words nearest to the static vector of the word, and their cosines; empty if the word has
    # no static vector.
    static: list[tuple[str, float]]
    contextual: list[dict[str, list[Neighbour]]]  # for each query, neighbours by layer
    embedder: str  # name of the embedder of the contextual vectors


def compare(
    index: OccurrenceIndex,
    vectors: Mapping[str, np.ndarray],
    queries: Sequence[tuple[Sentence, int]],
    *,
    count: int = 5,
    words: Words = "any",
    per_word: int | None = 1,
) -> Comparison:
    """Finds the contextual neighbours of one word in several sentences, and its static neighbours.

    `vectors` are static vectors, trained on the same text. A query is (sentence, index of the
    word). All queries have the same word, ignoring case. `count` is the number of static
    neighbours, and of neighbours for each query and layer. For `words` and `per_word`, see
    `OccurrenceIndex.nearest`.
    """
    forms = {sentence[number].lower() for sentence, number in queries}
    if len(forms) != 1:
        raise ConfigError(
            f"all queries must be for one word, got {', '.join(sorted(forms)) or 'none'}"
        )
    (word,) = forms
    return Comparison(
        word,
        tuple(Neighbour(tuple(sentence), number, 1.0) for sentence, number in queries),
        most_similar(vectors, word, count) if word in vectors else [],
        [
            index.nearest(s, number, count=count, words=words, per_word=per_word)
            for s, number in queries
        ],
        index.embedder.name,
    )


def choose_sentences(
    text: Sequence[Sentence], word: str, most: int, seed: int = 0
) -> list[Sentence]:
    """Chooses at most `most` random sentences with and without a word, and keeps their order.

    At most max(1, `most` // 2) of them have the word. Raises ConfigError if no sentence of the text
    has the word.
    """
    wanted = word.lower()
    having = [n for n, sentence in enumerate(text) if wanted in map(str.lower, sentence)]
    if not having:
        raise ConfigError(f"the corpus has no word {word!r}: choose a word that occurs in it")
    rng = np.random.default_rng(seed)
    first = rng.permutation(having)[: max(1, most // 2)]
    rest = rng.permutation(np.setdiff1d(np.arange(len(text)), having))[: most - len(first)]
    return [text[number] for number in sorted([*first, *rest])]


def table(comparison: Comparison, layers: Sequence[str] | None = None) -> Table:
    """Makes a table with a row for the static vector, then a row for each sentence and layer.

    If `layers` is None, the table has all layers.
    """
    static = [f"{word} {cosine:.2f}" for word, cosine in comparison.static]
    rows = [("any sentence", "static", static)]
    for query, by_layer in zip(comparison.queries, comparison.contextual, strict=True):
        for layer in by_layer if layers is None else layers:
            near = [f"{n.cosine:.2f} {n.context()}" for n in by_layer[layer]]
            rows.append((query.context(), layer, near))
    cells = [[source, layer, "\n".join(near) or MISSING] for source, layer, near in rows]
    title = f"nearest neighbours of {comparison.word!r}: static, and in context by {comparison.embedder}"
    return Table(title, ("source", "layer", "nearest, with the cosine"), cells, text_columns=3)
