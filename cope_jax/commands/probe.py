r"""Measures with linear probes what each layer encodes about parts of speech (syntax) and word
senses (meaning).

cope-jax probe --models=runs/elmo_small,runs/bert_small,minilm --corpora_dir=DATA \
    --workdir=runs/probe

Parts of speech come from UD English EWT, and word senses from CoarseWSD-20. Without --corpora_dir,
built-in samples replace both. Vectors are frozen. For each layer, the command shows the accuracy of
a linear probe with its 95 % interval, and the accuracy of the same probe on a control task that can
be solved only by memorising words. For each task, the command shows the baselines, the weight of
each layer in a probe on all layers, and the layer at which the answer is found (centre of gravity,
expected layer). A paragraph says whether the results support the claim that lower layers encode
syntax and higher layers encode meaning.

Writes probe.json, probe.md and two plots for each model into the workdir.
"""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.cli.flag_values import load_models
from cope_jax.corpora import conllu
from cope_jax.corpora.conllu import TaggedSentence
from cope_jax.corpora.word_sense_corpora import Occurrence, Split
from cope_jax.evaluation.contextual import contextual_plots, probing, word_senses
from cope_jax.evaluation.contextual.embedders import occurrence_vectors
from cope_jax.evaluation.contextual.linear_probe import ProbeConfig
from cope_jax.evaluation.contextual.probing import SENSES, TAGS, Probing, probe_layers
from cope_jax.evaluation.report.plot_style import save
from cope_jax.evaluation.report.table import console
from cope_jax.models.embedder import Embedder
from cope_jax.runs import workdir as workdirs

common_flags.DEFINE_encoding()
_MODELS = common_flags.DEFINE_models()
_CORPORA_DIR = common_flags.DEFINE_corpora_dir()
_WORKDIR = common_flags.DEFINE_workdir("Folder for tables and plots (required).")
_TRAIN_WORDS = common_flags.DEFINE_count(
    "train_words", 20_000, "For parts of speech: maximum number of words to train the probes on."
)
_TEST_WORDS = common_flags.DEFINE_count(
    "test_words", 5_000, "For parts of speech: maximum number of words to test the probes on."
)
_TRAIN_SENSES = common_flags.DEFINE_count(
    "train_per_word", 50, "For word senses: maximum number of training occurrences of each word."
)
_TEST_SENSES = common_flags.DEFINE_count(
    "test_per_word", 50, "For word senses: maximum number of test occurrences of each word."
)
_EPOCHS = common_flags.DEFINE_count("epochs", 20, "Number of epochs to train each probe for.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Random seed for the probes and the control task.", lower_bound=0
)

Task = tuple[list[Occurrence], list[Occurrence]]
"""(training words, test words), with their labels."""


def main() -> None:
    """Probes all models; writes and prints the results."""
    models = load_models(_MODELS.value)
    tasks = {TAGS: tags_task(_CORPORA_DIR.value), SENSES: senses_task(_CORPORA_DIR.value)}
    workdir = Path(_WORKDIR.value)
    config = ProbeConfig(epochs=_EPOCHS.value, seed=_SEED.value)
    with workdirs.Workdir(workdir).locked():
        probings = {
            model.name: {name: probe(model, name, task, config) for name, task in tasks.items()}
            for model in models
        }
        show(probings, {name: len(test) for name, (_, test) in tasks.items()}, workdir)


def tags_task(data_dir: str | None) -> Task:
    """Words and their parts of speech, in sampled sentences."""

    def occurrences(split: Split, most: int) -> list[Occurrence]:
        return [
            Occurrence(sentence.words, index, word, tag, split)
            for sentence in draw(conllu.read(data_dir, split), most)
            for index, (word, tag) in enumerate(zip(sentence.words, sentence.tags, strict=True))
        ]

    return occurrences("train", _TRAIN_WORDS.value), occurrences("test", _TEST_WORDS.value)


def draw(sentences: Sequence[TaggedSentence], most: int, seed: int = 0) -> list[TaggedSentence]:
    """Samples sentences at random, because corpora are sorted by kind.

    The sample has at most `most` words in total, or only one sentence.
    """
    order = np.random.default_rng(seed).permutation(len(sentences))
    ends = np.cumsum([len(sentences[number].words) for number in order])
    count = max(1, int(np.searchsorted(ends, most, side="right")))
    return [sentences[number] for number in sorted(order[:count])]


def senses_task(data_dir: str | None) -> Task:
    """Occurrences of twenty nouns, labelled with lemma and sense.

    The control task identifies a word by its lemma.
    """
    most = _TRAIN_SENSES.value, _TEST_SENSES.value
    sides = word_senses.read_occurrences("coarsewsd20", data_dir, *most)
    train, test = (
        [
            dataclasses.replace(occurrence, sense=f"{occurrence.lemma} {occurrence.sense}")
            for occurrence in side
        ]
        for side in sides
    )
    return train, test


def probe(model: Embedder, name: str, task: Task, config: ProbeConfig) -> Probing:
    """Computes the vectors of a task, in half precision, and probes all layers."""

    def read(side: list[Occurrence]) -> tuple[np.ndarray, list[str], list[str]]:
        sentences, places = [o.words for o in side], [o.index for o in side]
        label = f"{name}, {side[0].split}"
        vectors = occurrence_vectors(model, sentences, places, dtype=np.float16, label=label)
        lemmas, senses = ([getattr(o, name) for o in side] for name in ("lemma", "sense"))
        return vectors, lemmas, senses

    train, test = task
    return probe_layers(model.name, model.layers, read(train), read(test), config)


def show(
    probings: Mapping[str, Mapping[str, Probing]], sizes: Mapping[str, int], workdir: Path
) -> None:
    """Writes and prints tables, plots and the paragraph."""
    out, parts, plots = console(), [], []
    conclusion = probing.paragraph(probings, sizes)
    records = {
        name: {task: probing.record(probed, sizes[task]) for task, probed in by_task.items()}
        for name, by_task in probings.items()
    }
    for name, by_task in probings.items():
        for task, probed in by_task.items():
            title = f"{name}, {task}: linear probes, in % [95 % interval]"
            table = probing.table(probed, sizes[task], title)
            mix = probing.mix_summary(probed)
            out.print(table.rich(), mix, sep="\n", soft_wrap=True)
            parts += [table.markdown(), mix]
        plots += plot(name, by_task, sizes, workdir)
    out.print(f"\n{conclusion}\n", markup=False)
    content = {"models": records, "tested": dict(sizes), "paragraph": conclusion}
    text = "\n\n".join([*parts, textwrap.fill(conclusion, 120)])
    outputs.list_files([*outputs.write(workdir, "probe", content, text), *plots])


def plot(
    name: str, by_task: Mapping[str, Probing], sizes: Mapping[str, int], workdir: Path
) -> list[Path]:
    """Plots accuracies by layer, with intervals and baselines, and the mixes of layers."""
    layers = [score.layer for score in next(iter(by_task.values())).scores]
    lines = {
        task: [[score.accuracy for score in probed.scores]] for task, probed in by_task.items()
    }
    baselines: dict[str, float] = {}
    for task, probed in by_task.items():
        lines[f"control of {task}"] = [[score.control for score in probed.scores]]
        baselines |= {f"{kind}, {task}": value for kind, value in probed.baselines.items()}
    intervals = {
        line: [probing.wilson_interval(share, sizes[task]) for share in lines[line][0]]
        for task in by_task
        for line in (task, f"control of {task}")
    }
    caption = f"tested on {', '.join(f'{size:,} {task}' for task, size in sizes.items())}; bars: 95 % intervals"
    title = f"{name}, linear probes"
    texts = {"title": title, "caption": caption}
    figure = contextual_plots.scores_by_layer(layers, lines, baselines, intervals, **texts)
    weights = {task: [probed.mix] for task, probed in by_task.items()}
    texts = {"title": f"{name}, probe on all layers", "caption": "one probe per task"}
    mixes = contextual_plots.mix_weights(layers, weights, **texts)
    paths = [contextual_plots.plot_path(workdir, kind, name) for kind in ("probe", "mix")]
    return [save(figure, paths[0]), save(mixes, paths[1])]
