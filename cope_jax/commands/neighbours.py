r"""Finds the nearest neighbours of a word in a sentence, by layer and by context-free vector, or
predicts word senses.

cope-jax neighbours --models=runs/elmo_small,runs/bert_small,minilm --corpora_dir=DATA --word=play \
    --sentences="She wrote a play for the theatre|They play on the lawn" --workdir=runs/neighbours
cope-jax neighbours --task=senses --models=runs/elmo_small,minilm --corpora_dir=DATA --workdir=runs/senses

The context-free vectors come from word2vec, trained on the training text of WikiText-2. Neighbours
come from --corpus_sentences sentences of this text; at most half of these sentences contain the
word. With --task=senses, the nearest training occurrences predict the sense of a word, on
CoarseWSD-20 or SemCor. Without --corpora_dir, built-in samples replace the corpora.

The table shows the last layer of each model; --layers=all shows every layer. neighbours.json always
has every layer.

Writes neighbours.json and neighbours.md, or senses.json, senses.md and a plot for each model, into
the workdir.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.cli.flag_values import load_models
from cope_jax.corpora import sentences_by_corpus
from cope_jax.corpora.word_sense_corpora import CORPORA, Occurrence
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import contextual_plots, nearest_words, word_senses
from cope_jax.evaluation.contextual.word2vec import (
    ContextFree,
    ContextMean,
    Word2VecConfig,
    train_word2vec,
)
from cope_jax.evaluation.report.plot_style import save
from cope_jax.evaluation.report.table import MISSING, Table, console, share
from cope_jax.models.embedder import Embedder, Sentence
from cope_jax.runs import workdir as workdirs

_TASK = flags.DEFINE_enum(
    "task",
    "neighbours",
    ["neighbours", "senses"],
    "Find the neighbours of --word, or predict the senses of words.",
)
common_flags.DEFINE_encoding()
_MODELS = common_flags.DEFINE_models()
_CORPORA_DIR = common_flags.DEFINE_corpora_dir()
_WORKDIR = common_flags.DEFINE_workdir("Folder for tables and plots (required).")
_EPOCHS = common_flags.DEFINE_count("word2vec_epochs", 5, "Number of epochs to train word2vec for.")
_WORD = flags.DEFINE_string(
    "word", None, "Word to find neighbours of (required for --task=neighbours)."
)
_SENTENCES = common_flags.DEFINE_text(
    "sentences", "Sentences that contain --word, separated by | (required for --task=neighbours)."
)
_CORPUS_SENTENCES = common_flags.DEFINE_count(
    "corpus_sentences", 3000, "For --task=neighbours: maximum number of sentences to search."
)
_COUNT = common_flags.DEFINE_count(
    "count", 3, "For --task=neighbours: number of neighbours to find for each sentence and layer."
)
_LAYERS = flags.DEFINE_enum(
    "layers",
    "last",
    ["last", "all"],
    "For --task=neighbours: which layers of each model the table shows.",
)
_CORPUS = flags.DEFINE_enum(
    "corpus",
    "coarsewsd20",
    list(CORPORA),
    "For --task=senses: corpus to read, with labelled word senses.",
)
_TRAIN = common_flags.DEFINE_count(
    "train_per_word", 100, "For --task=senses: maximum number of training occurrences per word."
)
_TEST = common_flags.DEFINE_count(
    "test_per_word", 50, "For --task=senses: maximum number of test occurrences per word."
)
_K = common_flags.DEFINE_count(
    "k", 5, "For --task=senses: number of nearest training occurrences that vote on a sense."
)

LARGE = 50_000
"""If a text has at least this number of words, word2vec leaves out rare words."""
WAYS: dict[str, tuple[nearest_words.Words, int | None]] = {
    "of the word": ("same", None),
    "of any word": ("any", 1),
}
"""By heading: the occurrences that can be neighbours, and how many of one word may be."""
Scores = Mapping[str, Sequence["word_senses.SenseScore"]]
"""The scores of each model or baseline, by name."""


def main() -> None:
    """Finds neighbours or predicts senses, then writes and prints the results."""
    workdir = Path(_WORKDIR.value)
    if _TASK.value == "neighbours":
        queries = read_queries(_WORD.value, _SENTENCES.value)
        text = read_text()
        corpus = nearest_words.choose_sentences(text, _WORD.value or "", _CORPUS_SENTENCES.value)
        models = load_models(_MODELS.value)
        with workdirs.Workdir(workdir).locked():
            find_neighbours(models, queries, text, corpus, workdir)
    else:
        models = load_models(_MODELS.value)
        counts = _TRAIN.value, _TEST.value
        train, test = word_senses.read_occurrences(_CORPUS.value, _CORPORA_DIR.value, *counts)
        with workdirs.Workdir(workdir).locked():
            show_senses(score_models(models, train, test), train, test, workdir)


def read_text() -> list[Sentence]:
    """The sentences of WikiText-2's training text."""
    documents = sentences_by_corpus.documents("wikitext-2", _CORPORA_DIR.value, "train")
    return [sentence for document in documents for sentence in document]


def read_queries(word: str | None, sentences: str | None) -> list[tuple[Sentence, int]]:
    """Returns (a sentence, the index of the word in the sentence) for each sentence.

    Raises:
      ConfigError: the word or a sentence is missing.
    """
    given = {"word": word, "sentences": sentences}
    missing = [f"--{name}" for name, value in given.items() if not value]
    if not word or not sentences:
        raise ConfigError(
            f"--task=neighbours needs {' and '.join(missing)}: see --help, or set --task=senses"
        )
    queries: list[tuple[Sentence, int]] = []
    for sentence in filter(None, map(str.split, sentences.split("|"))):
        lower = [other.lower() for other in sentence]
        if word.lower() not in lower:
            raise ConfigError(
                f"the sentence {' '.join(sentence)!r} has no word {word!r}: put spaces around the word"
            )
        queries.append((sentence, lower.index(word.lower())))
    if not queries:
        raise ConfigError(
            "--sentences has no sentence: give sentences that contain the word, separated by |"
        )
    return queries


def static_vectors(sentences: Sequence[Sentence]) -> dict[str, Any]:
    """Trains word2vec on the sentences. In a small text, it also learns words that occur once."""
    words = sum(map(len, sentences))
    print(f"word2vec: {_EPOCHS.value} epochs of {words:,} words", file=sys.stderr)
    config = Word2VecConfig(epochs=_EPOCHS.value, min_count=5 if words >= LARGE else 1)
    return train_word2vec(sentences, config)


def find_neighbours(
    models: Sequence[Embedder],
    queries: Sequence[tuple[Sentence, int]],
    text: Sequence[Sentence],
    corpus: Sequence[Sentence],
    workdir: Path,
) -> None:
    """Finds neighbours in the corpus, and writes and prints them.

    word2vec learns from the entire text.
    """
    out = console()
    vectors = static_vectors(text)
    parts: list[str] = []
    results: dict[str, Any] = {}
    words = sum(map(len, corpus))
    for model in models:
        index = nearest_words.OccurrenceIndex(
            model, corpus, max_words=words, label="words of the corpus"
        )
        results[model.name] = {}
        for way, (kind, per_word) in WAYS.items():
            compared = nearest_words.compare(
                index, vectors, queries, count=_COUNT.value, words=kind, per_word=per_word
            )
            layers = None if _LAYERS.value == "all" else model.layers[-1:]
            table = nearest_words.table(compared, layers)
            parts.append(f"## {model.name}: occurrences {way}\n\n{table.markdown()}")
            results[model.name][way] = [
                {
                    layer: [neighbour.record() for neighbour in near]
                    for layer, near in layers.items()
                }
                for layers in compared.contextual
            ]
            out.print(f"[bold]{model.name}: occurrences {way}[/bold]", table.rich(), sep="\n")
    content = {
        "word": _WORD.value,
        "sentences": [
            {"words": list(sentence), "place": word_index} for sentence, word_index in queries
        ],
        "corpus": {"sentences": len(corpus), "words": words},
        "static": [{"word": word, "cosine": cosine} for word, cosine in compared.static],
        "models": results,
    }
    outputs.list_files(outputs.write(workdir, "neighbours", content, "\n\n".join(parts)))


def score_models(
    models: Sequence[Embedder], train: Sequence[Occurrence], test: Sequence[Occurrence]
) -> Scores:
    """Scores the baseline without vectors, context-free vectors, and all layers of models."""
    vectors = static_vectors(read_text())
    static: list[Embedder] = [
        ContextFree(vectors, "word2vec, word"),
        ContextMean(vectors, "word2vec, context"),
    ]
    baseline = word_senses.most_frequent(train, test)
    scores_of = {"no vectors": [word_senses.score("most frequent", "", test, baseline)]}
    for model in (*static, *models):
        scored = word_senses.disambiguate(model, train, test, k=_K.value, label="occurrences")
        _, *scores_of[model.name] = scored
    return scores_of


def show_senses(
    scores_of: Scores, train: Sequence[Occurrence], test: Sequence[Occurrence], workdir: Path
) -> None:
    """Writes and prints the shares of correct senses; plots them for models of several layers."""
    rows, records = [], []
    for name, scores in scores_of.items():
        for score in scores:
            micro, macro = score.interval(), score.interval(macro=True)
            shares = share(score.micro, micro), share(score.macro, macro)
            rows.append([name, score.layer or MISSING, score.method, *shares])
            figures: dict[str, Any] = {"micro": score.micro, "macro": score.macro}
            figures |= {"micro_interval": micro, "macro_interval": macro}
            records.append({"model": name, **dataclasses.asdict(score), **figures})
    sizes = f"{_CORPUS.value}: {len(train):,} known occurrences, {len(test):,} to predict"
    title = f"correct senses, in % [95 % interval]; {sizes}"
    table = Table(title, ("model", "layer", "method", "micro", "macro"), rows, text_columns=3)
    content = {"corpus": _CORPUS.value, "train": len(train), "test": len(test)}
    content |= {"k": _K.value, "scores": records}
    paths = outputs.write(workdir, "senses", content, table.markdown())
    layers = {
        name: list(dict.fromkeys(score.layer for score in scores))
        for name, scores in scores_of.items()
    }
    baselines = {
        name: max(score.micro for score in scores)
        for name, scores in scores_of.items()
        if len(layers[name]) < 2
    }
    for name in (name for name in scores_of if name not in baselines):
        lines: dict[str, list[list[float]]] = {}
        intervals: dict[str, list[tuple[float, float]]] = {}
        for score in scores_of[name]:
            lines.setdefault(score.method, [[]])[0].append(score.micro)
            intervals.setdefault(score.method, []).append(score.interval())
        shown: dict[str, str] = {"label": "correct senses (%)", "title": f"{name}, word senses"}
        shown["caption"] = f"{sizes}; bars: 95 % intervals"
        figure = contextual_plots.scores_by_layer(
            layers[name], lines, baselines, intervals, **shown
        )
        paths.append(save(figure, contextual_plots.plot_path(workdir, "senses", name)))
    console().print(table.rich())
    outputs.list_files(paths)
