r"""What is near to a word in its sentence, by layer, beside its context-free vector; and which sense it has by that.

python -m experiments.neighbours --models=runs/elmo_small,runs/bert_small,minilm --data_dir=DATA --word=play \
    --sentences="She wrote a play for the theatre|They play on the lawn" --workdir=runs/neighbours
python -m experiments.neighbours --task=senses --models=runs/elmo_small,minilm --data_dir=DATA --workdir=runs/senses

The context-free vectors are word2vec's on the training words of WikiText-2, in whose sentences neighbours are looked
for: all occurrences of the word, and as many other sentences as --corpus_sentences leaves room for. With --task=senses
the nearest known occurrences say which sense a word has, on CoarseWSD-20 or SemCor. Without --data_dir built-in samples
stand in for the corpora.

Writes neighbours.json and neighbours.md, or senses.json, senses.md and a plot for each model, into the workdir.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from cope_jax.corpora.sense_occurrences import Occurrence
from cope_jax.evaluation.contextual import contextual_plots, nearest_words, word_senses
from cope_jax.evaluation.contextual import sense_data as shared
from cope_jax.evaluation.contextual.embedders import ContextFree
from cope_jax.models.embedder import Embedder, Sentence
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import environment, write_atomically
from experiments.cli import entry

_TASK = flags.DEFINE_enum("task", "neighbours", ["neighbours", "senses"], "What to look at.")
_MODELS = flags.DEFINE_list("models", None, 'Runs, folders of published models, "minilm".', required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of corpora; without it, the built-in samples.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for tables and plots.", required=True)
_EPOCHS = flags.DEFINE_integer("word2vec_epochs", 5, "Passes of word2vec over the text.", lower_bound=1)
_WORD = flags.DEFINE_string("word", None, "Whose neighbours to look for.")
_SENTENCES = flags.DEFINE_string("sentences", None, "Sentences that have the word, with | between them.")
_CORPUS_SENTENCES = flags.DEFINE_integer("corpus_sentences", 3000, "To look for neighbours in.", lower_bound=1)
_COUNT = flags.DEFINE_integer("count", 5, "Neighbours to show.", lower_bound=1)
_CORPUS = flags.DEFINE_enum("corpus", "coarsewsd20", list(shared.CORPORA), "Of word senses.")
_TRAIN = flags.DEFINE_integer("train_per_word", 100, "Most occurrences of known sense of a word.", lower_bound=1)
_TEST = flags.DEFINE_integer("test_per_word", 50, "Most occurrences of a word to be tested on.", lower_bound=1)
_K = flags.DEFINE_integer("k", 5, "Nearest occurrences that vote.", lower_bound=1)

WAYS: dict[str, tuple[nearest_words.Words, int | None]] = {"of the word": ("same", None), "of any word": ("any", 1)}
"""Which occurrences count, and how many of one word."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """How well the senses are told by a model, or a floor."""

    model: str
    layers: tuple[str, ...]
    scores: list[word_senses.SenseScore]


def main() -> None:
    """Looks for neighbours, or tells senses apart; writes and prints what is found."""
    workdir, console = Path(_WORKDIR.value), Console()
    if _TASK.value == "neighbours":
        queries = shared.read_queries(_WORD.value, _SENTENCES.value)
        text = shared.text(_DATA_DIR.value)
        corpus = shared.choose(text, _WORD.value or "", _CORPUS_SENTENCES.value)
        models = shared.load_models(_MODELS.value)
        with workdirs.locked(workdir):
            look(models, queries, text, corpus, workdir, console)
    else:
        models = shared.load_models(_MODELS.value)
        train, test = shared.read(_CORPUS.value, _DATA_DIR.value, _TRAIN.value, _TEST.value)
        with workdirs.locked(workdir):
            show_senses(tell(models, train, test), train, test, workdir, console)


def look(
    models: Sequence[Embedder],
    queries: Sequence[tuple[Sentence, int]],
    text: Sequence[Sentence],
    corpus: Sequence[Sentence],
    workdir: Path,
    console: Console,
) -> None:
    """Finds, writes and prints the neighbours.

    Args:
      models: give the contextual vectors.
      queries: sentences, and the place of the word in each.
      text: that word2vec learns from.
      corpus: what neighbours are looked for in.
      workdir: for the files.
      console: for the tables.
    """
    vectors = shared.static_vectors(text, _EPOCHS.value)
    parts: list[str] = []
    found: dict[str, Any] = {}
    for model in models:
        with shared.Progress(model, "words of the corpus", len(corpus)) as embedder:
            index = nearest_words.OccurrenceIndex(embedder, corpus, max_words=sum(map(len, corpus)), chunk=shared.CHUNK)
        found[model.name] = {}
        for way, (words, per_word) in WAYS.items():
            compared = nearest_words.compare(
                index, vectors, queries, count=_COUNT.value, words=words, per_word=per_word
            )
            parts.append(f"## {model.name}: occurrences {way}\n\n{nearest_words.markdown(compared)}")
            found[model.name][way] = [
                {layer: [_plain(one) for one in near] for layer, near in layers.items()}
                for layers in compared.contextual
            ]
            table = nearest_words.rich_table(compared)
            console.print(f"[bold]{model.name}: occurrences {way}[/bold]", table, sep="\n")
    content = {
        "word": _WORD.value,
        "sentences": [{"words": list(sentence), "place": place} for sentence, place in queries],
        "corpus": {"sentences": len(corpus), "words": sum(map(len, corpus))},
        "static": [{"word": word, "cosine": cosine} for word, cosine in compared.static],
        "models": found,
        "environment": environment(),
    }
    workdirs.write_json(workdir / "neighbours.json", content)
    write_atomically(workdir / "neighbours.md", "\n".join(parts))
    console.print(workdir / "neighbours.json", workdir / "neighbours.md", sep="\n", soft_wrap=True, highlight=False)


def _plain(one: nearest_words.Neighbour) -> dict[str, Any]:
    return {"word": one.word, "cosine": one.cosine, "place": one.place, "sentence": " ".join(one.sentence)}


def tell(models: Sequence[Embedder], train: Sequence[Occurrence], test: Sequence[Occurrence]) -> list[Scores]:
    """The floor without vectors, the context-free ones, and all layers of each model."""
    vectors = shared.static_vectors(shared.text(_DATA_DIR.value), _EPOCHS.value)
    floor = word_senses.score("most frequent", "", test, word_senses.most_frequent(train, test))
    found = [Scores("no vectors", (), [floor])]
    total = len({one.words for one in train}) + len({one.words for one in test})
    static: list[Any] = [
        ContextFree(vectors, "word2vec, word"),
        shared.ContextMean(vectors, "word2vec, context"),
    ]
    for model in [*static, *models]:
        with shared.Progress(model, "occurrences", total) as embedder:
            _, *own = word_senses.disambiguate(embedder, train, test, k=_K.value)
        found.append(Scores(model.name, model.layers, own))
    return found


def show_senses(
    found: Sequence[Scores],
    train: Sequence[Occurrence],
    test: Sequence[Occurrence],
    workdir: Path,
    console: Console,
) -> None:
    """Writes and prints how well senses are told, with a plot for each model that has layers."""
    sizes = f"{_CORPUS.value}: {len(train):,} known occurrences, {len(test):,} to tell"
    rows = [(own.model, one) for own in found for one in own.scores]
    table = Table(*_HEADINGS[:3], title=f"senses told right, in % [95 % interval]; {sizes}", title_justify="left")
    for heading in _HEADINGS[3:]:
        table.add_column(heading, justify="right")
    for model, one in rows:
        table.add_row(model, *_cells(one))
    lines = [_HEADINGS, ("---", "---", "---", "---:", "---:"), *((model, *_cells(one)) for model, one in rows)]
    markdown = f"Senses told right, in % [95 % interval]; {sizes}.\n\n" + "".join(
        f"| {' | '.join(line)} |\n" for line in lines
    )
    content = {
        "corpus": _CORPUS.value,
        "train": len(train),
        "test": len(test),
        "k": _K.value,
        "scores": [{"model": model, **_record(one)} for model, one in rows],
        "environment": environment(),
    }
    paths = [workdir / "senses.json", workdir / "senses.md"]
    workdirs.write_json(paths[0], content)
    write_atomically(paths[1], markdown)
    floors = {own.model: max(one.micro for one in own.scores) for own in found if len(own.layers) < 2}
    for own in found:
        if len(own.layers) > 1:
            figure = contextual_plots.scores_by_layer(
                own.layers, _by_method(own.scores), floors, label="senses told right (%)", title=own.model
            )
            paths.append(contextual_plots.save(figure, shared.plot_path(workdir, "senses", own.model)))
    console.print(table)
    console.print(*paths, sep="\n", soft_wrap=True, highlight=False)


_HEADINGS = ("model", "layer", "method", "micro", "macro")


def _cells(one: word_senses.SenseScore) -> tuple[str, ...]:
    ends = (one.interval(), one.interval(macro=True))
    shares = (
        f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        for value, (low, high) in zip((one.micro, one.macro), ends, strict=True)
    )
    return (one.layer or "–", one.method, *shares)


def _record(one: word_senses.SenseScore) -> dict[str, Any]:
    averages = {"micro": one.micro, "macro": one.macro}
    intervals = {"micro_interval": one.interval(), "macro_interval": one.interval(macro=True)}
    return {**dataclasses.asdict(one), **averages, **intervals}


def _by_method(scores: Sequence[word_senses.SenseScore]) -> Mapping[str, list[list[float]]]:
    """One run of each method over the layers."""
    methods = dict.fromkeys(one.method for one in scores)
    return {method: [[one.micro for one in scores if one.method == method]] for method in methods}


if __name__ == "__main__":
    entry.run(main)
