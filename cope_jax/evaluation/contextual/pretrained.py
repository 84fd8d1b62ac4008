"""Embedders from what is on disk: a run of the train command, or a model in a published format."""

from pathlib import Path
from typing import Any

from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.exchange import bert_files, elmo_files, formats, safetensors_io
from cope_jax.models.embedder import ModelEmbedder
from cope_jax.models.encoder import EncoderConfig
from cope_jax.runs import workdir
from cope_jax.runs.load import load_run

MINILM = "minilm"
"""Stands for the folder of an installed MiniLM wherever a folder is asked for."""


def find(text: str | None) -> Path:
    """The folder that a flag names; "minilm" is that of the installed package."""
    if text is None:
        raise ConfigError("no model is named")
    folder = bert_files.find_minilm() if text == MINILM else Path(text)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: train a model there with experiments.train, or name another")
    known = any((folder / name).exists() for name in ("checkpoints", "options.json"))
    if not known and not safetensors_io.holds_model(folder):
        raise ConfigError(
            f"{folder} holds no model: it needs the checkpoints of a run; or config.json, model.safetensors and "
            f"vocab.txt, as Hugging Face has them; or options.json and weights of an ELMo"
        )
    return folder


def stamp(text: str | None) -> dict[str, Any]:
    """What tells a model from another, and from itself before it was trained further."""
    folder = find(text)
    checkpoints = folder / "checkpoints"
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    return {"folder": str(folder.resolve()), "step": steps[-1] if steps else None}


def lowercase(folder: Path) -> bool:
    """Whether a pretrained model's pieces are of text made small."""
    if (folder / "config.json").exists() and (folder / "checkpoints").exists():
        options: dict[str, Any] = workdir.read_settings(folder)["config"]["task"]["options"]
        return bool(options.get("lowercase", True))
    path = folder / "tokenizer_config.json"
    return bool(workdir.read_json(path).get("do_lower_case", True)) if path.exists() else True


def load(text: str | None, name: str | None = None) -> ModelEmbedder:
    """The embedder of a folder.

    Args:
      text: a run of a model that gives words vectors; a BERT in the format of Hugging Face; an ELMo in that of
        AllenNLP; "minilm".
      name: of the embedder; None: of its kind of model.

    Raises:
      ConfigError: there is no such model.
    """
    folder = find(text)
    if (folder / "options.json").exists():
        weights = sorted(folder.glob("*weights.hdf5"))
        if not weights:
            raise ConfigError(f"{folder} has options.json but no *weights.hdf5: put the weights of that ELMo beside it")
        return elmo_files.load_elmo(folder / "options.json", weights[0]).embedder(folder, name=name)
    if safetensors_io.holds_model(folder):  # a published file may lack the heads, which no embedder needs
        model = formats.build(*formats.load(folder), rngs=nnx.Rngs(0))
    else:
        run = load_run(folder)
        model = run.learner.rebuild(run.params[0])
    name = name or ("MiniLM" if text == MINILM else None)
    return model.embedder(folder, lowercase=lowercase(folder), name=name)


def encoder_of(text: str | None) -> EncoderConfig:
    """The config of a trained encoder, of which a head's must be."""
    folder = find(text)
    holds_model = safetensors_io.holds_model(folder)
    config = formats.load(folder)[0] if holds_model else load_run(folder).learner.model
    if not isinstance(config, EncoderConfig):
        raise ConfigError(f"{folder} holds {config.name}: choose a run of bert, or a folder of Hugging Face")
    return config
