"""Heads on a pretrained encoder: their configs, and what they learned."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.models.encoder import EncoderConfig, EncoderOptions
from cope_jax.runs.load import load, load_run
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig


def on_encoder(config: ExperimentConfig, model: str | None, *, frozen: bool, vocabulary: str) -> ExperimentConfig:
    """The config of a head, such as bert_tagger, that starts from a pretrained model with its sizes and vocabulary.

    A frozen encoder stays as it is. `vocabulary` names the option of the task that takes the path of a vocabulary.
    """
    found = load(model)
    encoder = found.config
    if not isinstance(encoder, EncoderConfig):
        raise ConfigError(f"{found.folder} holds {found.name}: choose a run of bert, or a folder of Hugging Face")
    chosen = {vocabulary: str(found.folder / "vocab.txt"), "lowercase": pretrained.lowercase(found)}
    same = {f.name: getattr(encoder, f.name) for f in dataclasses.fields(EncoderOptions) if f.name != "name"}
    return dataclasses.replace(
        config,
        task=TaskConfig(config.task.name, {**config.task.options, **chosen}),
        model=dataclasses.replace(config.model, **same, frozen=frozen),
        encoding=encoder.encoding.text(),
        training=dataclasses.replace(config.training, start=str(found.folder), max_position=encoder.max_length),
    )


def classify(workdir: Path, split: str = "test") -> np.ndarray:
    """The classes that a trained bert_classifier finds most probable for the examples of a split of its task."""
    run = load_run(workdir)
    task = run.task  # with the pieces that the encoder knows
    graph, state = nnx.split(run.model())

    @jax.jit
    def predict(state: Any, batch: Mapping[str, Any]) -> Any:
        logits_BC = nnx.merge(graph, state)(batch["inputs"], batch["segments"], batch["mask"])
        return jnp.argmax(logits_BC, axis=-1)

    size, found = task.size(split), []
    assert size is not None
    for batch in pipeline.evaluation_batches(task, split, examples=size, batch_size=64, seed=0):
        found.append(np.asarray(predict(state, batch)))
    return np.concatenate(found)[:size]


def mix_weights(workdir: Path) -> list[float] | None:
    """The weights, summing to 1, by which a trained run mixes layers; None where it mixes none."""
    mix = getattr(load_run(workdir).model(), "mix", None)
    return None if mix is None else np.asarray(mix.shares()).tolist()
