"""The nearest neighbours of a word in its sentence, by layer, compared with those of its context-free vector.

"play" in two sentences: a static vector has one list of neighbours for both; contextual vectors have one for each.
Peters et al. (arXiv 1802.05365), table 4.
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
    """An occurrence of a word near a query."""

    sentence: tuple[str, ...]  # its words
    place: int  # index of the word in the sentence
    cosine: float  # with the vector of the query

    @property
    def word(self) -> str:
        return self.sentence[self.place]

    def record(self) -> dict[str, Any]:
        """The fields for JSON."""
        return {"word": self.word, "cosine": self.cosine, "place": self.place, "sentence": " ".join(self.sentence)}

    def context(self, words: int = 5, mark: str = "*") -> str:
        """The word, marked, with up to `words` words on each side.

        >>> Neighbour(("he", "saw", "a", "play", "again"), 3, 1.0).context(1)
        '… a *play* again'
        """
        start, stop = max(0, self.place - words), self.place + 1 + words
        before, after = self.sentence[start : self.place], self.sentence[self.place + 1 : stop]
        parts = ["…"] * (start > 0) + [*before, f"{mark}{self.word}{mark}", *after]
        return " ".join(parts + ["…"] * (stop < len(self.sentence)))


class OccurrenceIndex:
    """The words of a corpus as unit vectors in every layer, N × J × D half floats: 200,000 × 3 × 256 take 300 MB.

    Sentences beyond `max_words` words are left out; no sentence is cut. `label`: see `embed`.
    """

    def __init__(
        self, embedder: Embedder, sentences: Sequence[Sentence], *, max_words: int = 200_000, label: str | None = None
    ):
        check_at_least(1, "neighbours", max_words=max_words)
        ends = np.cumsum([len(sentence) for sentence in sentences])
        kept = int(np.searchsorted(ends, max_words, side="right"))
        if not kept:
            raise ConfigError("neighbours: the corpus has no sentence within max_words words: give text, or raise it")
        self.embedder = embedder
        self.sentences = [tuple(sentence) for sentence in sentences[:kept]]
        self._rows = np.array([(s, i) for s, words in enumerate(self.sentences) for i in range(len(words))], np.int32)
        self._words = np.array([self.sentences[s][i].lower() for s, i in self._rows])
        vectors = embed(embedder, self.sentences, label=label)
        self._units_JND = np.concatenate([normalise(own_JLD).astype(np.float16) for own_JLD in vectors], axis=1)

    def __len__(self) -> int:
        """The number of words in the index."""
        return len(self._rows)

    def nearest(
        self, sentence: Sentence, place: int, *, count: int = 10, words: Words = "any", per_word: int | None = None
    ) -> dict[str, list[Neighbour]]:
        """The occurrences with the highest cosine with a word in a sentence, by layer, the nearest first.

        The sentence need not be in the corpus; if it is, the word itself does not count. `words` restricts the search
        to the "same" word or to "other" words, ignoring case; `per_word` is the maximum number of occurrences per word.
        """
        check_at_least(1, "neighbours", count=count, per_word=per_word)
        if words not in ("any", "same", "other"):
            raise ConfigError(f"neighbours.words must be 'any', 'same' or 'other', got {words!r}")
        (query_JD,) = occurrence_vectors(self.embedder, [sentence], [place])
        is_same = self._words == sentence[place].lower()
        allowed = {"any": np.ones_like(is_same), "same": is_same, "other": ~is_same}[words]
        own = [number for number, other in enumerate(self.sentences) if other == tuple(sentence)]
        allowed = allowed & ~(np.isin(self._rows[:, 0], own) & (self._rows[:, 1] == place))
        return {
            layer: self._best(units_ND, unit_D, allowed, count, per_word)
            for layer, units_ND, unit_D in zip(self.embedder.layers, self._units_JND, normalise(query_JD), strict=True)
        }

    def _best(
        self, units_ND: np.ndarray, unit_D: np.ndarray, allowed: np.ndarray, count: int, per_word: int | None
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
                number, place = map(int, self._rows[row])
                best.append(Neighbour(self.sentences[number], place, float(cosines[row])))
        return best


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The neighbours of a word in several sentences."""

    word: str  # in lowercase
    queries: tuple[Neighbour, ...]  # the sentences and the word's index in each, as neighbours of themselves
    # The words near its context-free vector, and their cosines; empty if it has no vector.
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
    """The contextual neighbours of one word in several sentences, and its static neighbours.

    The context-free vectors are trained on the same text. All queries, (sentence, index), are of the same word,
    ignoring case; the other options are those of `OccurrenceIndex.nearest`.
    """
    found = {sentence[place].lower() for sentence, place in queries}
    if len(found) != 1:
        raise ConfigError(f"neighbours are compared for one word, got {', '.join(sorted(found)) or 'none'}")
    (word,) = found
    return Comparison(
        word,
        tuple(Neighbour(tuple(sentence), place, 1.0) for sentence, place in queries),
        most_similar(vectors, word, count) if word in vectors else [],
        [index.nearest(s, place, count=count, words=words, per_word=per_word) for s, place in queries],
        index.embedder.name,
    )


def choose_sentences(text: Sequence[Sentence], word: str, most: int, seed: int = 0) -> list[Sentence]:
    """Chooses at most `most` random sentences, up to half with the word. ConfigError: no sentence has the word."""
    having = [place for place, sentence in enumerate(text) if word.lower() in map(str.lower, sentence)]
    if not having:
        raise ConfigError(f"the corpus has no word {word!r}: choose a word that occurs in it")
    rng = np.random.default_rng(seed)
    first = rng.permutation(having)[: max(1, most // 2)]
    rest = rng.permutation(np.setdiff1d(np.arange(len(text)), having))[: most - len(first)]
    return [text[place] for place in sorted([*first, *rest])]


def table(comparison: Comparison) -> Table:
    """A row for the static vector, then one for each sentence and layer."""
    rows = [("any sentence", "static", [f"{word} {cosine:.2f}" for word, cosine in comparison.static])]
    for query, layers in zip(comparison.queries, comparison.contextual, strict=True):
        for layer, neighbours in layers.items():
            rows.append((query.context(), layer, [f"{n.cosine:.2f} {n.context()}" for n in neighbours]))
    cells = [[source, layer, "\n".join(near) or MISSING] for source, layer, near in rows]
    title = f"nearest neighbours of {comparison.word!r}: static, and in context by {comparison.embedder}"
    return Table(title, ("source", "layer", "nearest, with the cosine"), cells, text_columns=3)
