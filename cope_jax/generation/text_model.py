"""Loads a model that generates text, and its tokenizer, from a run or from a folder with a model."""

from pathlib import Path
from typing import Any, NamedTuple

from cope_jax import models
from cope_jax.errors import ConfigError
from cope_jax.runs.load import load as load_folder
from cope_jax.tokenizers.tokenizer import Codec


class TextGenerator(NamedTuple):
    """A model with `prefill` and `decode`, its one-line title, its codec, and the length it was trained on."""

    title: str
    model: Any
    codec: Codec
    length: int


def load(folder: str | Path, seed: int | None = None) -> TextGenerator:
    """Loads the model of a run, by default of its first seed, or of a folder with a model and its tokenizer.

    Raises:
      ConfigError: there is no model, it cannot generate, or the tokenizer is missing or has another vocabulary.
    """
    found, able = load_folder(folder), models.able("generate")
    if found.name not in able:
        task = "" if found.experiment is None else f" on {found.experiment.task.name}"
        raise ConfigError(
            f"{folder} contains a {found.name}{task}, which cannot generate here: give a run of a {' or '.join(able)}"
        )
    codec = found.codec
    if codec is None:
        raise ConfigError(f"{folder} has no tokenizer: put its tokenizer.json, words.txt, or GPT-2's two files there")
    length = found.config.max_length if found.task is None else found.task.length("train")
    return TextGenerator(found.title(seed), found.model(seed), codec, length)
