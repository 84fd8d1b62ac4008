"""Copies a trained model into another format: ours, or Hugging Face's if that has the architecture.

python -m experiments.convert --model=runs/cope --out=exported/cope
python -m experiments.convert --model=runs/absolute --out=exported/absolute --format=gpt2
python -m experiments.convert --model=downloads/Llama-3.2-1B --out=starts/llama

Prints the flags that make a config of the same model train it further. docs/exchange.md
"""

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from cope_jax import models
from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.exchange import formats, safetensors_io
from cope_jax.runs import warm_start
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import load
from cope_jax.tasks.stored import TextTask
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.word_level import Words
from experiments.cli import entry

_MODEL = flags.DEFINE_string(
    "model", None, "Folder of a training run, or of a model in one of the formats of --format.", required=True
)
_OUT = flags.DEFINE_string("out", None, "Folder to write to, new or empty.", required=True)
_FORMAT = flags.DEFINE_enum("format", formats.OWN, sorted(formats.FORMATS), "Format to write.")
_SEED = flags.DEFINE_integer("seed", None, "Seed of the run to copy; without it, the first.")
entry.renamed("from", "model")
entry.renamed("to", "out")

COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "encoder.json", "merges.txt", "words.txt", "generation_config.json"),
)
"""Files next to a model that are copied with it."""


def main() -> None:
    """Reads and writes the model, and prints how to train it further."""
    source, target = Path(_MODEL.value), Path(_OUT.value)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder: choose another --out")
    if not source.is_dir():
        raise ConfigError(f"there is no folder {source}: give --model a run, or a folder with a model")
    found = load(source)
    texts: dict[str, str] = {}
    tokens: dict[str, Any] = {}
    if found.task is not None and found.experiment is not None:
        texts = dict(found.task.saved_files())
        on_text = isinstance(found.task, TextTask)
        options = found.experiment.task.options
        if "lowercase" in options:  # whether pieces are lower-case, which no vocabulary says
            texts["tokenizer_config.json"] = json.dumps({"do_lower_case": options["lowercase"]}) + "\n"
    else:
        on_text = found.name in models.able("generate")
        if safetensors_io.holds_model(source):
            tokens = safetensors_io.read_tokens(source)
    config, params = found.config, jax.device_get(found.params(_SEED.value))
    formats.save(target, config, params, _FORMAT.value, tokens)
    workdirs.write_files(target, texts)
    for name in COMPANIONS:
        if (source / name).exists() and not (target / name).exists():
            with clear_storage_errors(target / name):
                shutil.copyfile(source / name, target / name)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{target}: {config.name}, {size:,} parameters, in the format {_FORMAT.value}")
    vocabulary = list(vocabulary_flags(target)) if on_text else []
    print(f"to train it further, with a config of the model {config.name}{' on text' if vocabulary else ''}:")
    print(" \\\n  ".join(shlex.quote(flag) for flag in [*flags_of(target), *vocabulary]))


def flags_of(folder: Path) -> Iterator[str]:
    """The flags of experiments.train that set its model to the folder's and start training from it."""
    config = load(folder).config  # as written: a format may express the same config differently
    yield f"--config.training.start={folder}"
    if hasattr(config, "encoding"):
        yield f"--config.encoding={config.encoding.text() or 'none'}"
        if _shapes(config) != _shapes(dataclasses.replace(config, max_length=config.max_length + 1)):
            yield f"--config.training.max_position={config.max_length}"
    options = {field.name for field in dataclasses.fields(models.MODELS.get(config.name).Options)}
    for name, value in warm_start.choices(config).items():
        if value is not None and name.partition(".")[0] in options:
            yield f"--config.model.{name}={value}"


def vocabulary_flags(folder: Path) -> Iterator[str]:
    """The flags of experiments.train that give the task text the tokenizer of the folder, if it has one."""
    try:
        tokenizer = loading.find(folder)
    except ConfigError as error:
        print(f"warning: training on text cannot use this tokenizer: {error}", file=sys.stderr)
        return
    if tokenizer is not None:
        yield f"--config.task.options.tokenizer={'words' if isinstance(tokenizer, Words) else 'bpe'}"
        yield f"--config.task.options.vocab={folder}"


def _shapes(config: Any) -> dict[Any, Any]:
    return {path: leaf.shape for path, leaf in safetensors_io.shapes(models.MODELS.get(config.name), config).items()}


if __name__ == "__main__":
    entry.run(main)
