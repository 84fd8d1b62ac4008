"""Embedders from what is on disk: a run of the train command, or a model in a published format."""

from cope_jax.errors import ConfigError
from cope_jax.models.embedder import ModelEmbedder
from cope_jax.models.encoder import EncoderConfig
from cope_jax.runs import workdir
from cope_jax.runs.load import MINILM as MINILM
from cope_jax.runs.load import Loaded
from cope_jax.runs.load import load as load_folder


def lowercase(found: Loaded) -> bool:
    """Whether a pretrained model's pieces are of text made small."""
    if found.experiment is not None:
        return bool(found.experiment.task.options.get("lowercase", True))
    path = found.folder / "tokenizer_config.json"
    return bool(workdir.read_json(path).get("do_lower_case", True)) if path.exists() else True


def load(text: str | None, name: str | None = None) -> ModelEmbedder:
    """The embedder of a run of a model that gives words vectors, of a published BERT or ELMo, or of "minilm".

    Its name, where none is given, is that of its kind of model. Raises ConfigError where there is no such model.
    """
    found = load_folder(text)
    name = name or ("MiniLM" if text == MINILM else None)
    embedder: ModelEmbedder = found.model().embedder(found.folder, lowercase=lowercase(found), name=name)
    return embedder


def encoder_of(text: str | None) -> EncoderConfig:
    """The config of a trained encoder, of which a head's must be."""
    found = load_folder(text)
    if not isinstance(found.config, EncoderConfig):
        raise ConfigError(f"{found.folder} holds {found.name}: choose a run of bert, or a folder of Hugging Face")
    return found.config
