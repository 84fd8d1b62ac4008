"""Loads a model that generates text, and its tokenizer, from a run or a folder with a model."""

import sys
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
      length: the length of training sequences, in tokens. For a model without a task, the maximum
        length in its config, if there is one.
    """

    title: str
    model: Any
    codec: Codec
    length: int


def load(folder: str | Path, seed: int | None = None) -> TextGenerator:
    """Loads a model and its tokenizer from a folder with a run or with a model.

    `seed` chooses among the seeds of a run. If `seed` is None, the first seed is loaded.

    Raises:
      ConfigError: there is no model, the model cannot generate, or the tokenizer is missing or does
        not fit the model.
    """
    loaded, able = load_folder(folder), models.able("generate")
    if loaded.name not in able:
        task = "" if loaded.experiment is None else f" on {loaded.experiment.task.name}"
        raise ConfigError(
            f"{folder} contains the model {loaded.name}{task}; this command cannot generate text with it: "
            f"give a run of a {' or '.join(able)}"
        )
    codec = loaded.codec
    if codec is None:
        raise ConfigError(
            f"{folder} has no tokenizer: put tokenizer.json, words.txt, or GPT-2's two files there"
        )
    most = getattr(loaded.config, "max_length", sys.maxsize)
    length = most if loaded.task is None else loaded.task.length("train")
    return TextGenerator(loaded.title(seed), loaded.model(seed), codec, length)
