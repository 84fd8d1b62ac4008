"""Loads a model that generates text, and its tokenizer, from a run or from a folder with a model."""

from pathlib import Path
from typing import Any, NamedTuple

from cope_jax import models
from cope_jax.errors import ConfigError
from cope_jax.runs.load import load as load_folder
from cope_jax.tokenizers.tokenizer import Codec


class TextGenerator(NamedTuple):
    """A model that generates text, with its tokenizer.

    Attributes:
      title: one line that names the model.
      model: a module with `prefill` and `decode`.
      codec: turns text into tokens, and tokens into text.
      length: the length of training sequences, in tokens. For a model without a task, the maximum length in its config.
    """

    title: str
    model: Any
    codec: Codec
    length: int


def load(folder: str | Path, seed: int | None = None) -> TextGenerator:
    """Loads a model and its tokenizer from a folder with a run or with a model.

    `seed` chooses among the seeds of a run. If `seed` is None, the first seed is loaded.

    Raises:
      ConfigError: there is no model, the model cannot generate, or the tokenizer is missing or does not fit the model.
    """
    found, able = load_folder(folder), models.able("generate")
    if found.name not in able:
        task = "" if found.experiment is None else f" on {found.experiment.task.name}"
        raise ConfigError(
            f"{folder} contains a {found.name}{task}; this command cannot generate text with it: "
            f"give a run of a {' or '.join(able)}"
        )
    codec = found.codec
    if codec is None:
        raise ConfigError(f"{folder} has no tokenizer: put tokenizer.json, words.txt, or GPT-2's two files there")
    length = found.config.max_length if found.task is None else found.task.length("train")
    return TextGenerator(found.title(seed), found.model(seed), codec, length)
