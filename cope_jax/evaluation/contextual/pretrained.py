"""Embedders from what is on disk: a run of the train command, or a model in a published format."""

from collections.abc import Callable
from typing import Any

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.embedders import BertEmbedder, ElmoEmbedder, Embedder, RnnEmbedder
from cope_jax.models.bert import BertConfig
from cope_jax.runs import workdir
from cope_jax.runs.load import MINILM as MINILM
from cope_jax.runs.load import Loaded
from cope_jax.runs.load import load as load_folder
from cope_jax.tokenizers.vocabulary import Vocabulary
from cope_jax.tokenizers.wordpiece import WordPiece


def stamp(text: str | None) -> dict[str, Any]:
    """What tells a model from another, and from itself before it was trained further."""
    found = load_folder(text)
    return {"folder": str(found.folder.resolve()), "step": found.step}


def lowercase(found: Loaded) -> bool:
    """Whether a pretrained model's pieces are of text made small."""
    if found.experiment is not None:
        return bool(found.experiment.task.options.get("lowercase", True))
    path = found.folder / "tokenizer_config.json"
    return bool(workdir.read_json(path).get("do_lower_case", True)) if path.exists() else True


def load(text: str | None, name: str | None = None) -> Embedder:
    """The embedder of a folder.

    Args:
      text: a run of rnn_lm, elmo or bert; a BERT in the format of Hugging Face; an ELMo in that of AllenNLP; "minilm".
      name: of the embedder; None: of its kind of model.

    Raises:
      ConfigError: there is no such model.
    """
    found = load_folder(text)
    if found.name not in _EMBEDDERS:
        raise ConfigError(
            f"{found.folder} holds {found.name}, which gives words no vectors: choose a run of {', '.join(_EMBEDDERS)}"
        )
    usual, embed = _EMBEDDERS[found.name]
    return embed(found, name or ("MiniLM" if text == MINILM else usual))


def _bert(found: Loaded, name: str) -> Embedder:
    pieces = WordPiece.load(found.folder / "vocab.txt", lowercase=lowercase(found))
    return BertEmbedder(found.model(), pieces, name=name)


def _elmo(found: Loaded, name: str) -> Embedder:
    return ElmoEmbedder(found.model(), name=name)


def _rnn(found: Loaded, name: str) -> Embedder:
    return RnnEmbedder(found.model(), Vocabulary.load(found.folder / "words.txt"), name=name)


_EMBEDDERS: dict[str, tuple[str, Callable[[Loaded, str], Embedder]]] = {
    "bert": ("BERT", _bert),
    "elmo": ("ELMo", _elmo),
    "rnn_lm": ("RNN", _rnn),
}
"""By the name of a model: what its embedder is called, and how it is made."""


def encoder_of(text: str | None) -> BertConfig:
    """The config of a trained BERT, of which a head's encoder must be."""
    found = load_folder(text)
    if not isinstance(found.config, BertConfig):
        raise ConfigError(f"{found.folder} holds {found.name}: choose a run of bert, or a folder of Hugging Face")
    return found.config
