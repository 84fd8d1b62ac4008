"""Embedders from what is on disk: a run of the train command, or a model in a published format."""

from pathlib import Path
from typing import Any

from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.embedders import BertEmbedder, ElmoEmbedder, Embedder, RnnEmbedder
from cope_jax.exchange import bert_files, elmo_files, formats, safetensors_io
from cope_jax.models.bert import BertConfig
from cope_jax.runs import workdir
from cope_jax.runs.load import load_run
from cope_jax.tokenizers.vocabulary import Vocabulary
from cope_jax.tokenizers.wordpiece import WordPiece

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


def load(text: str | None, name: str | None = None) -> Embedder:
    """The embedder of a folder.

    Args:
      text: a run of rnn_lm, elmo or bert; a BERT in the format of Hugging Face; an ELMo in that of AllenNLP; "minilm".
      name: of the embedder; None: of its kind of model.

    Raises:
      ConfigError: there is no such model.
    """
    folder = find(text)
    if (folder / "options.json").exists():
        weights = sorted(folder.glob("*weights.hdf5"))
        if not weights:
            raise ConfigError(f"{folder} has options.json but no *weights.hdf5: put the weights of that ELMo beside it")
        return ElmoEmbedder(elmo_files.load_elmo(folder / "options.json", weights[0]), name=name or "ELMo")
    kind, model = _rebuild(folder)
    if kind == "bert":
        pieces = WordPiece.load(folder / "vocab.txt", lowercase=lowercase(folder))
        return BertEmbedder(model, pieces, name=name or ("MiniLM" if text == MINILM else "BERT"))
    if kind == "elmo":
        return ElmoEmbedder(model, name=name or "ELMo")
    if kind == "rnn_lm":
        return RnnEmbedder(model, Vocabulary.load(folder / "words.txt"), name=name or "RNN")
    raise ConfigError(f"{folder} holds {kind}, which gives words no vectors: choose a run of rnn_lm, elmo or bert")


def _rebuild(folder: Path) -> tuple[str, Any]:
    """A model and the name of its kind, from a folder with its tensors or from a run."""
    if not safetensors_io.holds_model(folder):
        run = load_run(folder)
        return run.config.model.name, run.learner.rebuild(run.params[0])
    config, params = formats.load(folder)
    if config.name == "bert":  # of which a published file may lack the heads
        return config.name, bert_files.create(config, params, rngs=nnx.Rngs(0))
    return config.name, formats.build(config, params)


def encoder_of(text: str | None) -> BertConfig:
    """The config of a trained BERT, of which a head's encoder must be."""
    folder = find(text)
    holds_model = safetensors_io.holds_model(folder)
    config = formats.load(folder)[0] if holds_model else load_run(folder).learner.model
    if not isinstance(config, BertConfig):
        raise ConfigError(f"{folder} holds {config.name}: choose a run of bert, or a folder of Hugging Face")
    return config
