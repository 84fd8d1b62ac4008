"""Converts a trained model to our format, or to a format of Hugging Face that supports the
architecture.

cope-jax convert --model=runs/cope --out=runs/exported/cope
cope-jax convert --model=runs/absolute --out=runs/exported/absolute --format=gpt2
cope-jax convert --model=downloads/Llama-3.2-1B --out=runs/exported/llama

Also writes OUT/train.py, a config that trains the model further, and prints the command that uses
it. More is in docs/exchange.md.
"""

import dataclasses
import json
import pprint
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from cope_jax import models, tasks
from cope_jax.cli import common_flags, outputs
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, clear_storage_errors
from cope_jax.evaluation.contextual import pretrained
from cope_jax.exchange import formats, safetensors_io
from cope_jax.models.model import deciding_options
from cope_jax.registry import configure
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import RUN, Loaded, LoadedRun, load
from cope_jax.storage.mirror import shown
from cope_jax.tasks.stored import TextTask
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.word_level import Words
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of a training run, or of a model in one of the formats that --format names, or name of a trained model of "
    "the package, such as counting (required)."
)
_OUT = common_flags.DEFINE_out("Folder to write to; it must be new or empty (required).")
_FORMAT = flags.DEFINE_string(
    "format",
    "cope_jax",
    "Format to write: ours (cope_jax), or one of Hugging Face's: bert, roberta, xlm-roberta, distilbert, mpnet, "
    "electra or modernbert of a BERT; gpt2, llama, qwen2, qwen3, mistral, gpt_neox, opt, gemma2 or gemma3_text of a "
    "decoder.",
)
_SEED = common_flags.DEFINE_seed()

COMPANIONS = (
    *(
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "added_tokens.json",
        "special_tokens_map.json",
    ),
    *(
        "vocab.json",
        "vocab.txt",
        "vocab.bpe",
        "encoder.json",
        "merges.txt",
        "words.txt",
        "generation_config.json",
    ),
    "corpus.json",  # the digest of the text that a run was trained on
)
"""Names of files that are copied with a model if they are in its folder."""

TRAIN = "train.py"
"""The name of the config file that is written next to the model."""

_FILE = '''"""Trains the model in this folder further."""

from cope_jax.training import config_files


def get_config() -> config_files.ConfigDict:
    return config_files.experiment(
{arguments}    )
'''


def main() -> None:
    """Reads and writes the model, and prints how to train it further."""
    target = Path(_OUT.value)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder: choose another --out")
    common_flags.check_names("--format", [_FORMAT.value], formats.FORMATS)
    loaded = load(_MODEL.value)
    source = loaded.folder
    texts: dict[str, str] = {}
    tokens: dict[str, Any] = {}
    if loaded.task is not None and loaded.experiment is not None:
        texts = dict(loaded.task.saved_files())
        options = loaded.experiment.task.options
        if "lowercase" in options:  # no vocabulary says whether its pieces are lower-case
            texts["tokenizer_config.json"] = (
                json.dumps({"do_lower_case": options["lowercase"]}) + "\n"
            )
    elif safetensors_io.holds_model(source):
        tokens = safetensors_io.read_tokens(source)
    companions = [name for name in COMPANIONS if (source / name).exists()]
    for name in companions:
        if not (source / name).is_file():
            raise ConfigError(
                f"{source / name} is not a file: delete it, or put the right one there"
            )
    config, params = loaded.config, jax.device_get(loaded.params(_SEED.value))
    formats.save(target, config, params, _FORMAT.value, tokens)
    workdirs.write_files(target, texts)
    if isinstance(loaded, LoadedRun) and _FORMAT.value == formats.OWN:
        workdirs.write_json(target / RUN, about(loaded, _SEED.value))
    for name in companions:
        if not (target / name).exists():
            with clear_storage_errors(target / name):
                shutil.copyfile(source / name, target / name)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{shown(target)}: {config.name}, {size:,} parameters, in the format {_FORMAT.value}")
    try:
        values = training_config(loaded, target)
    except ConfigError as error:
        print(f"warning: {TRAIN} is not written, because {error}", file=sys.stderr)
        return
    workdirs.write_files(target, {TRAIN: config_text(values)})
    options = values["task"]["options"]
    unknown = loaded.experiment is None and options.get("data_dir", "") is None
    data_dir = "--config.task.options.data_dir=DATA " if unknown else ""
    config_file = shown(target / TRAIN)
    command = f"{outputs.program()} train --config={config_file} {data_dir}--workdir=runs/NAME"
    print(f"to train it further: {command}")


def about(run: LoadedRun, seed: int | None) -> dict[str, Any]:
    """The facts that the copy of a run keeps, so that `load` returns a run."""
    return {
        "config": run.experiment.recipe(),
        "seeds": [run.seeds[0] if seed is None else seed],
        "step": run.restored.step,
        "seconds": run.restored.seconds,
        "environment": run.environment,
    }


def training_config(loaded: Loaded, folder: Path) -> dict[str, Any]:
    """Returns the config that trains the model in `folder` further.

    It is based on the config of the run `found` or, if `found` is no run, on a config file with the
    same kind of model.

    Raises:
      ConfigError: the model generates text, but has no tokenizer that the task can read.
    """
    model = load(folder).config  # as written: a format may express the same config differently
    values = (loaded.experiment or _experiment_with(model.name)).to_dict()
    name, options, folder = values["task"]["name"], values["task"]["options"], folder.resolve()
    if loaded.experiment is None and issubclass(tasks.TASKS.get(name), TextTask):
        tokenizer = loading.find(folder)
        if tokenizer is None:
            raise ConfigError(
                "the model has no tokenizer: put the files of its tokenizer into the folder of --model"
            )
        kind = "words" if isinstance(tokenizer, Words) else "bpe"
        options |= {"tokenizer": kind, "vocab": str(folder), "vocab_size": None}
    else:
        options |= tasks.TASKS.get(name).with_saved_files(options, folder)
        if "lowercase" in options:
            options["lowercase"] = pretrained.lowercase(loaded)
    config_of_task: Any = configure(tasks.TASKS.get(name).Config, options, name)
    values["task"]["options"] = dataclasses.asdict(config_of_task)
    values["training"]["start"] = str(folder)
    if hasattr(model, "encoding"):
        if (
            EncodingConfig.parse(values["encoding"], values["encodings"]).options()
            != model.encoding.options()
        ):
            values |= {"encoding": model.encoding.text() or "none", "encodings": {}}
        if _shapes(model) != _shapes(dataclasses.replace(model, max_length=model.max_length + 1)):
            values["training"]["max_position"] = model.max_length
    for name, value in deciding_options(model).items():
        group, _, option = name.rpartition(".")
        chosen = values["model"].get(group, {}) if group else values["model"]
        if value is not None and option in chosen:
            chosen[option] = value
    return values


def _experiment_with(model: str) -> ExperimentConfig:
    """The experiment of a config with this model: on text if there is one, small if possible."""
    names = sorted(config_files.names(), key=lambda name: (":" not in name, name))
    configs = [
        config for name in names if (config := config_files.config(name)).model.name == model
    ]
    if not configs:
        raise ConfigError(
            f"no file of cope_jax/configs has the model {model}: add a config file with this model"
        )
    on_text = [
        config for config in configs if issubclass(tasks.TASKS.get(config.task.name), TextTask)
    ]
    return (on_text or configs)[-1]


def config_text(values: Mapping[str, Any]) -> str:
    """The text of a config file with these fields. The text omits defaults, `job` and `paper`."""
    name, model = values["task"]["name"], {"name": values["model"]["name"]}
    defaults = config_files.experiment(name, model=model).to_dict() | {
        "job": values["job"],
        "paper": values["paper"],
    }
    fields = _changes(values, defaults)
    options = fields.pop("task", {}).get("options", {})
    fields["model"] = model | fields.get("model", {})
    arguments = ""
    for begin, value in [
        ("", name),
        ("", options),
        *((f"{field}=", value) for field, value in fields.items()),
    ]:
        indent = " " * (8 + len(begin))
        written = f"        {begin}{pprint.pformat(value, sort_dicts=False)},\n"
        arguments += written.replace("\n ", f"\n{indent} ")
    return _FILE.format(arguments=arguments)


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that differ from the defaults, as nested dicts.

    >>> _changes({"steps": 4, "block": {"dim": 8, "norm": "rms"}}, {"steps": 4, "block": {"dim": 8, "norm": "layer"}})
    {'block': {'norm': 'rms'}}
    """
    changed = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value, default = _changes(value, default), {}
        if value != default:
            changed[name] = value
    return changed


def _shapes(config: Any) -> dict[Any, Any]:
    shapes = safetensors_io.shapes(models.MODELS.get(config.name), config)
    return {path: leaf.shape for path, leaf in shapes.items()}
