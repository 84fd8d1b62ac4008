"""The configs on text, and what `cope-jax train` makes of them, on the built-in samples."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.runs.experiment import Experiment
from cope_jax.training.experiment_config import JobConfig, MeshConfig, OptimizerConfig, TaskConfig
from cope_jax.training.from_config import create_iterator, create_learner
from cope_jax.training.metrics import read_metrics
from tests.commands.shrink import TEXT, load, shrink

QUICKEST = {"tagger"}
"""Of those that the tests of commands do not train as well, in other sizes."""
TRAINED = [pytest.param(name, marks=[] if name in QUICKEST else pytest.mark.slow) for name in TEXT]
DECAYED = {"bert", "code:small", "elmo", "spam", "tagger", "tagger:bert", "wikitext2:lstm"}
"""One of each model."""
LOSSES = {"bert": ["mlm_loss", "nsp_loss"], "tagger": ["tag_loss", "penalty"]}


@pytest.mark.parametrize("name", TRAINED)
def test_every_config_on_text_trains_once_shrunk(name, tmp_path, capsys):
    config = shrink(load(name))
    if config.model.name == "bert_tagger":
        config = with_pieces(config, tmp_path)
    experiment = Experiment(config)
    records = experiment.train(tmp_path, verbose=True)
    data = experiment.task.origin()
    assert "small built-in sample" in data or "standard library" in data
    assert f"data         {data}\n" in capsys.readouterr().err
    model = config.model.name
    measured = {record["metric"] for record in records}
    assert measured >= {*LOSSES.get(model, ["loss"]), experiment.task.metric}
    swept = (
        [split for _, split in experiment.task.sweep] if config.evaluation.sweep_examples else []
    )
    assert {record["split"] for record in records} == {*experiment.task.evaluation_splits, *swept}
    assert all(math.isfinite(record["value"]) for record in records)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "split" not in row]
    assert [row["step"] for row in rows] == [1, 2]
    if len(LOSSES.get(model, ())) > 1:
        assert rows[0]["loss"] == pytest.approx(
            sum(rows[0][name] for name in LOSSES[model]), rel=1e-5
        )


def with_pieces(config, folder):
    """The task with a vocabulary of pieces, which a tagger on BERT has from its encoder."""
    text = tasks.create("masked_lm", vocab_size=200).saved_files()["vocab.txt"]
    (folder / "vocab.txt").write_text(text)
    options = config.task.options | {"pieces": str(folder / "vocab.txt")}
    return dataclasses.replace(config, task=dataclasses.replace(config.task, options=options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wikitext2:lstm", "bert", "elmo", "code:small"])
def test_a_batch_that_is_split_over_devices_gives_the_same_loss(name):
    """And parameters, or packed sequences, that are, where the mesh says so."""
    config = shrink(load(name))
    options = {field: 0.0 for field in ("dropout",) if hasattr(config.model, field)}
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **options),
        training=dataclasses.replace(config.training, batch_size=4),
        evaluation=dataclasses.replace(config.evaluation, batch_size=4),
    )
    losses = []
    parts = MeshConfig(data=2, sequence=2) if name == "code:small" else MeshConfig(data=2, fsdp=2)
    for mesh in (MeshConfig(data=1), parts):
        experiment = Experiment(dataclasses.replace(config, job=JobConfig(mesh)))
        iterator = create_iterator(config, experiment.task, 0)
        batches = [next(iterator) for _ in range(2)]
        stacked = {field: np.stack([batch[field] for batch in batches]) for field in batches[0]}
        program = experiment.program
        _, measured = program.train_steps(program.init([0]), program.place(stacked, 4))
        losses.append(np.asarray(measured["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_reads_word_after_word_refuses_a_sequence_over_devices():
    config = shrink(load("elmo"))
    config = dataclasses.replace(config, job=JobConfig(MeshConfig(data=1, sequence=2)))
    with pytest.raises(
        ConfigError, match=r"^elmo reads word by word: leave job.mesh.sequence at 1$"
    ):
        Experiment.check(config)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DECAYED else pytest.mark.slow) for name in TEXT]
)
def test_weight_decay_leaves_biases_norms_and_mixes_alone(name, tmp_path):
    config = shrink(load(name))
    if config.model.name == "bert_tagger":
        config = with_pieces(config, tmp_path)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers="mix"))
    optimizer = OptimizerConfig(
        weight_decay=0.1, decayed="weights", warmup_steps=0, schedule="constant"
    )
    learner = create_learner(
        dataclasses.replace(config, optimizer=optimizer), experiment_task(config)
    )
    shapes = jax.eval_shape(learner.init, np.int32(0)).params
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)

    @jax.jit
    def update(params):
        gradients = jax.tree.map(jnp.zeros_like, params)
        return learner.optimizer.update(gradients, learner.optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        updates = update(params)
    for path_of_leaf, change in jax.tree_util.tree_leaves_with_path(updates):
        leaf_name = jax.tree_util.keystr(path_of_leaf)
        spared = any(word in leaf_name for word in ("bias", "scale", "'mix'"))
        assert (np.abs(change).max() > 0) == (not spared), leaf_name


def experiment_task(config):
    return tasks.create(config.task.name, **config.task.options)


def test_models_without_attention_refuse_an_encoding():
    config = shrink(load("wikitext2:lstm"))
    with pytest.raises(
        ConfigError,
        match=r"^rnn_lm has no attention, and so no position encoding: set encoding=none$",
    ):
        Experiment.check(dataclasses.replace(config, encoding="rope"))


@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        (
            "tagger:bert",
            None,
            "the model bert_tagger needs 'starts' in its batches, which the task tagging does not give",
        ),
        (
            "bert",
            "words",
            "the model bert needs 'next' in its batches, which the task words does not give",
        ),
        ("tagger", "words", "the model tagger does not fit the task words .*num_tags"),
        (
            "wikitext2:lstm",
            "text",
            "rnn_lm carries its state .* text do not continue one another: set model.carries=False",
        ),
    ],
)
def test_a_model_on_a_task_that_it_does_not_fit_is_one_line(name, task, message):
    config = shrink(load(name))
    if task is not None:
        config = dataclasses.replace(config, task=TaskConfig(task, {}))
    with pytest.raises(ConfigError, match=f"^{message}"):
        Experiment.check(config)


@pytest.mark.slow
def test_a_bert_reads_with_any_encoding_that_makes_sense_without_a_mask():
    config = shrink(load("bert"))
    names = (
        "none",
        "sinusoidal",
        "rope",
        "alibi",
        "t5(bidirectional=True)",
        "relative(signed=True)",
        "cope_two_sided",
    )
    for encoding in names:
        Experiment.check(dataclasses.replace(config, encoding=encoding))


def test_the_equal_models_have_equally_many_parameters():
    """Within one per cent, with the vocabulary of WikiText-2."""
    numbers = []
    for name in ("wikitext2:rnn", "wikitext2:lstm", "wikitext2:transformer"):
        config = load(name)
        task = tasks.create("words", length=35)
        task.vocab_size = 33278
        learner = create_learner(config, task)
        shapes = jax.eval_shape(learner.init, np.int32(0)).params
        numbers.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    assert max(numbers) / min(numbers) < 1.01


@pytest.mark.parametrize(
    ("name", "vocabulary", "millions"),
    [
        (
            "wikitext103",
            50_257,
            {"learned": 124.4, "relative": 123.7, "cope": 123.7, "cope+relative": 123.7},
        ),
        ("code", 32_000, {"learned": 20.8, "rope": 19.8}),
    ],
)
def test_the_papers_language_models_have_its_numbers_of_parameters(name, vocabulary, millions):
    config = load(name)
    task = tasks.create("text", **config.task.options | {"corpus": "wikitext-2", "vocab_size": 300})
    task.vocab_size = vocabulary
    for encoding, published in millions.items():
        learner = create_learner(dataclasses.replace(config, encoding=encoding), task)
        shapes = jax.eval_shape(learner.init, np.int32(0)).params
        assert round(sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6, 1) == published, (
            encoding
        )
