r"""What each layer knows: linear probes of parts of speech (syntax) and word senses (meaning), with their floors.

python -m experiments.probe --models=runs/elmo_small,runs/bert_small,minilm --data_dir=DATA --workdir=runs/probe

Parts of speech are those of UD English EWT, word senses those of CoarseWSD-20; without --data_dir built-in samples
stand in for both. Vectors are frozen. For each layer: the accuracy of a linear probe with its 95 % interval, and of the
same probe on a control task that only memory solves; for each task: the floors, how a probe on all layers mixes them,
and the layer at which the answer is found (centre of gravity, expected layer). A paragraph says what that means for
"lower layers know syntax, higher ones meaning".

Writes probe.json, probe.md, and two plots for each model, into the workdir.
"""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from cope_jax.corpora import conllu
from cope_jax.corpora.conllu import TaggedSentence
from cope_jax.evaluation.contextual import contextual_plots
from cope_jax.evaluation.contextual import sense_data as shared
from cope_jax.evaluation.contextual.embedders import occurrence_vectors
from cope_jax.evaluation.contextual.linear_probe import ProbeConfig
from cope_jax.evaluation.contextual.probe_report import SENSES, TAGS, interval, paragraph, record
from cope_jax.evaluation.contextual.probing import Probing, probe_layers
from cope_jax.models.embedder import Embedder
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.records import environment, write_atomically
from experiments.cli import entry

_MODELS = flags.DEFINE_list("models", None, 'Runs, folders of published models, "minilm".', required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of corpora; without it, the built-in samples.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for tables and plots.", required=True)
_TRAIN_WORDS = flags.DEFINE_integer("train_words", 20_000, "Words that probes of tags learn from.", lower_bound=1)
_TEST_WORDS = flags.DEFINE_integer("test_words", 5_000, "Words that they are tested on.", lower_bound=1)
_TRAIN_SENSES = flags.DEFINE_integer("train_per_word", 50, "Occurrences to learn senses from, a word.", lower_bound=1)
_TEST_SENSES = flags.DEFINE_integer("test_per_word", 50, "Occurrences to be tested on, a word.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Passes of a probe over its vectors.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of probes and the control task.", lower_bound=0)

Labelled = tuple[np.ndarray, list[str], list[str]]
"""Vectors `[N, J, D]`, words and labels."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is probed: how vectors of a model, words and labels are made for training and test."""

    name: str
    train: tuple[list[tuple[str, ...]], list[int], list[str], list[str]]
    test: tuple[list[tuple[str, ...]], list[int], list[str], list[str]]


def main() -> None:
    """Probes all models; writes and prints what is found."""
    models = shared.load_models(_MODELS.value)
    tasks = [tags_task(_DATA_DIR.value), senses_task(_DATA_DIR.value)]
    workdir = Path(_WORKDIR.value)
    config = ProbeConfig(epochs=_EPOCHS.value, seed=_SEED.value)
    with workdirs.locked(workdir):
        found = {model.name: {task.name: probe(model, task, config) for task in tasks} for model in models}
        show(found, {task.name: len(task.test[1]) for task in tasks}, workdir, Console())


def tags_task(data_dir: str | None) -> Task:
    """Parts of speech, of sentences drawn until there are words enough."""
    parts = []
    for split, most in (("train", _TRAIN_WORDS.value), ("test", _TEST_WORDS.value)):
        sentences = conllu.read(data_dir, split)
        chosen = draw(sentences, most)
        parts.append(
            (
                [sentence.words for sentence in chosen for _ in sentence.words],
                [place for sentence in chosen for place in range(len(sentence.words))],
                [word for sentence in chosen for word in sentence.words],
                [tag for sentence in chosen for tag in sentence.tags],
            )
        )
    return Task(TAGS, parts[0], parts[1])


def draw(sentences: Sequence[TaggedSentence], most: int, seed: int = 0) -> list[TaggedSentence]:
    """Whole sentences with at most so many words, but one at least; by chance, for those of one kind stand together."""
    order = np.random.default_rng(seed).permutation(len(sentences))
    ends = np.cumsum([len(sentences[place].words) for place in order])
    count = max(1, int(np.searchsorted(ends, most, side="right")))
    return [sentences[place] for place in sorted(order[:count])]


def senses_task(data_dir: str | None) -> Task:
    """Senses of twenty nouns; a control task knows a word by its lemma."""
    train, test = shared.read("coarsewsd20", data_dir, _TRAIN_SENSES.value, _TEST_SENSES.value)
    parts = [
        ([o.words for o in own], [o.index for o in own], [o.lemma for o in own], [f"{o.lemma} {o.sense}" for o in own])
        for own in (train, test)
    ]
    return Task(SENSES, parts[0], parts[1])


def probe(model: Embedder, task: Task, config: ProbeConfig) -> Probing:
    """Makes the vectors of a task, in half floats, and probes all layers."""
    sides: list[Labelled] = []
    for side, (sentences, places, words, labels) in (("train", task.train), ("test", task.test)):
        with shared.Progress(model, f"{task.name}, {side}", len(set(sentences))) as embedder:
            sides.append((occurrence_vectors(embedder, sentences, places, dtype=np.float16), words, labels))
    return probe_layers(model.name, model.layers, sides[0], sides[1], config)


def show(found: Mapping[str, Mapping[str, Probing]], sizes: Mapping[str, int], workdir: Path, console: Console) -> None:
    """Writes and prints tables, plots and the paragraph."""
    paths = [workdir / "probe.json", workdir / "probe.md"]
    said = paragraph(found, sizes)
    content = {
        "models": {
            name: {task: record(own, sizes[task]) for task, own in by_task.items()} for name, by_task in found.items()
        },
        "tested": dict(sizes),
        "paragraph": said,
        "environment": environment(),
    }
    workdirs.write_json(paths[0], content)
    parts = []
    for name, by_task in found.items():
        for task, own in by_task.items():
            rows = _rows(own, sizes[task])
            table = Table(
                *_HEADINGS, title=f"{name}, {task}: linear probes, in % [95 % interval]", title_justify="left"
            )
            for row in rows:
                table.add_row(*row)
            console.print(table, _facts(own), sep="\n", soft_wrap=True, highlight=False)
            lines = [_HEADINGS, ("---",) * len(_HEADINGS), *rows]
            text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
            parts.append(f"## {name}, {task}\n\n{text}\n{_facts(own)}\n\n")
        paths += plot(name, by_task, workdir)
    write_atomically(paths[1], "".join(parts) + textwrap.fill(said, 120) + "\n")
    console.print(f"\n{said}\n", highlight=False, markup=False)
    console.print(*paths, sep="\n", soft_wrap=True, highlight=False)


def plot(name: str, by_task: Mapping[str, Probing], workdir: Path) -> list[Path]:
    """Accuracies by layer over their floors, and the shares of layers in the mixes."""
    layers = [score.layer for score in next(iter(by_task.values())).scores]
    lines: dict[str, list[list[float | None]]]
    lines = {task: [[score.accuracy for score in own.scores]] for task, own in by_task.items()}
    lines |= {f"control of {task}": [[score.control for score in own.scores]] for task, own in by_task.items()}
    floors = {f"{floor}, {task}": value for task, own in by_task.items() for floor, value in own.floors.items()}
    figure = contextual_plots.scores_by_layer(layers, lines, floors, title=f"{name}, linear probes")
    mixes = contextual_plots.mix_weights(layers, {task: [own.mix] for task, own in by_task.items()}, title=name)
    return [
        contextual_plots.save(figure, shared.plot_path(workdir, "probe", name)),
        contextual_plots.save(mixes, shared.plot_path(workdir, "mix", name)),
    ]


_HEADINGS = ("layer", "accuracy", "control", "selectivity", "mix")


def _rows(probing: Probing, size: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (f"none: {floor}", f"{100 * value:.1f}", "–", "–", "–") for floor, value in probing.floors.items()
    ]
    for score, share in zip(probing.scores, probing.mix, strict=True):
        low, high = interval(score.accuracy, size)
        memory = "–" if score.control is None else f"{100 * score.control:.1f}"
        selectivity = "–" if score.selectivity is None else f"{100 * score.selectivity:.1f}"
        accuracy = f"{100 * score.accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        rows.append((score.layer, accuracy, memory, selectivity, f"{100 * share:.1f}"))
    return rows


def _facts(probing: Probing) -> str:
    expected = "no layer mixed in adds to the lowest alone"
    if probing.expected_layer is not None:
        expected = f"expected layer {probing.expected_layer:.2f}"
    mixed = f"All layers mixed {100 * probing.mix_accuracy:.1f} %"
    return f"{mixed}, centre of gravity {probing.centre_of_gravity:.2f}, {expected}"


if __name__ == "__main__":
    entry.run(main)
