"""RoBERTa, XLM-R, DistilBERT, MPNet and ELECTRA in the format of transformers: BERT with options.

The tensors have the names and meaning of the class of masked language models.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import tensor_map
from cope_jax.exchange.bert_files import BERT
from cope_jax.exchange.safetensors_io import ACTIVATIONS, require, typed_value
from cope_jax.models.bert import Bert, BertConfig

ALIASES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
"""Second names of DistilBERT's sizes, which transformers prefers."""
_MPNET = EncodingConfig((("learned", {}), ("t5", {"bidirectional": True})))
_FREE = BERT.free
_REQUIRED = {name: BERT.required[name] for name in ("is_decoder", "add_cross_attention")}
_TIED = {"tie_word_embeddings": (True,)}
_GELU = {"hidden_act": ("gelu",)}  # their head of masked words has no other


def first_row(values: Mapping[str, Any]) -> int:
    """Returns the row of position 0. The rows before it belong to padding, whose position is the
    number of its token.
    """
    pad = typed_value("pad_token_id", 1, values, "config.json")
    if pad < 0:
        raise ConfigError(f"config.json: pad_token_id must be at least 0, got {pad}")
    return pad + 1


def _body(name: str) -> dict[str, str]:
    """The modules of BERT's encoder under the prefix of another model."""
    of_bert = {theirs: ours for theirs, ours in BERT.modules.items() if theirs.startswith("bert.")}
    return {name + theirs.removeprefix("bert"): ours for theirs, ours in of_bert.items()}


def _head(dense: str, norm: str, bias: str) -> dict[str, str]:
    """The modules of the head of masked words."""
    return {dense: "transform", norm: "transform_norm/norm", bias: ""}


def _read_after_padding(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    length = fields["max_length"] - first_row(values)
    return BERT.read(fields | {"max_length": length}, block, values, path)


_MPNET_FIRST_ROW = 2  # whatever its pad_token_id


def _read_mpnet(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    shared = {"type_vocab_size": 0, "encoding_sharing": "model"}
    length = fields["max_length"] - _MPNET_FIRST_ROW
    config = BERT.read(fields | shared | {"max_length": length}, block, values, path)
    return dataclasses.replace(config, encoding=_MPNET)


def _read_distilbert(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    sizes = (block["model_dim"], block["num_heads"], fields["num_layers"])
    require(values, path, **{name: (size,) for name, size in zip(ALIASES, sizes, strict=True)})
    return BERT.read(fields | {"type_vocab_size": 0}, block, values, path)


def _read_electra(
    fields: dict[str, Any], block: dict[str, Any], values: Mapping[str, Any], path: str
) -> BertConfig:
    width = fields["embedding_dim"]
    narrow = {"embedding_dim": None if width == block["model_dim"] else width}
    return BERT.read(fields | narrow, block, values, path)


def _write_after_padding(config: BertConfig) -> dict[str, Any]:
    length = tensor_map.table_length(config) + first_row({})
    return BERT.write(config) | {"max_position_embeddings": length, "pad_token_id": 1}


def _write_distilbert(config: BertConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": tensor_map.table_length(config),
        "hidden_dim": config.block.mlp_dim or 4 * config.block.model_dim,
        "attention_dropout": config.block.dropout,
        "pad_token_id": 0,
    }


def _write_electra(config: BertConfig) -> dict[str, Any]:
    return BERT.write(config) | {"embedding_size": config.embedding_block.model_dim}


def _without(*names: str) -> dict[str, tuple[Any, ...]]:
    return {name: value for name, value in BERT.values.items() if name not in names}


def _roberta(kind: str, architecture: str) -> tensor_map.Format:
    return tensor_map.Format(
        kind=kind,
        architecture=architecture,
        model=Bert,
        values=BERT.values,
        modules=_body("roberta") | _head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
        prefixes=("roberta.", "lm_head."),
        ignored=r"roberta\.embeddings\.(position_ids|token_type_ids)",
        tied={
            "lm_head.decoder.weight": "encoder/words/embedding",
            "lm_head.decoder.bias": "bias_V",
        },
        required=_GELU | {"position_embedding_type": ("absolute",)} | _REQUIRED | _TIED,
        free=_FREE,
        read=_read_after_padding,
        write=_write_after_padding,
        optional=("roberta.pooler.", "lm_head."),
        positions="roberta.embeddings.position_embeddings.weight",
        first_row=first_row,
    )


ROBERTA = _roberta("roberta", "RobertaForMaskedLM")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRobertaForMaskedLM")
DISTILBERT = tensor_map.Format(
    kind="distilbert",
    architecture="DistilBertForMaskedLM",
    model=Bert,
    values={
        "vocab_size": ("vocab_size", int),
        "max_position_embeddings": ("max_length", int),
        "n_layers": ("num_layers", int),
        "dim": ("block.model_dim", int),
        "n_heads": ("block.num_heads", int),
        "hidden_dim": ("block.mlp_dim", int),
        "activation": ("block.activation", str),
        # Also used for attention; its rate is not read.
        "dropout": ("block.dropout", float, 0.1),
        "initializer_range": ("block.initial_stddev", float, 0.02),
    },
    modules={
        "distilbert.embeddings.word_embeddings": "encoder/words",
        "distilbert.embeddings.position_embeddings": "encoder/encoding/learned",
        "distilbert.embeddings.LayerNorm": "encoder/norm/norm",
        "distilbert.transformer.layer.{}.attention.q_lin": "encoder/blocks/attention/query",
        "distilbert.transformer.layer.{}.attention.k_lin": "encoder/blocks/attention/key",
        "distilbert.transformer.layer.{}.attention.v_lin": "encoder/blocks/attention/value",
        "distilbert.transformer.layer.{}.attention.out_lin": "encoder/blocks/attention/out",
        "distilbert.transformer.layer.{}.sa_layer_norm": "encoder/blocks/attention_norm/norm",
        "distilbert.transformer.layer.{}.ffn.lin1": "encoder/blocks/mlp/inner",
        "distilbert.transformer.layer.{}.ffn.lin2": "encoder/blocks/mlp/outer",
        "distilbert.transformer.layer.{}.output_layer_norm": "encoder/blocks/mlp_norm/norm",
    }
    | _head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    prefixes=("distilbert.", "vocab_"),
    ignored=r"distilbert\.embeddings\.position_ids",
    tied={"vocab_projector.weight": "encoder/words/embedding"},
    required={"activation": tuple(ACTIVATIONS)} | _TIED,
    free=_FREE,
    read=_read_distilbert,
    write=_write_distilbert,
    optional=("vocab_",),
)
MPNET = tensor_map.Format(
    kind="mpnet",
    architecture="MPNetForMaskedLM",
    model=Bert,
    values=_without("type_vocab_size"),
    modules={
        theirs.replace("attention.self.query", "attention.attn.q")
        .replace("attention.self.key", "attention.attn.k")
        .replace("attention.self.value", "attention.attn.v")
        .replace("attention.output.dense", "attention.attn.o")
        .replace("attention.output.LayerNorm", "attention.LayerNorm"): ours
        for theirs, ours in _body("mpnet").items()
    }
    | {"mpnet.encoder.relative_attention_bias": "encoder/encoding/t5"}
    | _head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    prefixes=("mpnet.", "lm_head."),
    ignored=r"mpnet\.embeddings\.position_ids",
    tied={"lm_head.decoder.weight": "encoder/words/embedding", "lm_head.decoder.bias": "bias_V"},
    # Whatever the number of buckets is, transformers uses 32.
    required=_GELU | {"relative_attention_num_buckets": (32,)} | _TIED,
    free=frozenset({"learned.max_length", "learned.stddev", "t5.stddev"}),
    read=_read_mpnet,
    write=_write_after_padding,
    optional=("mpnet.pooler.", "lm_head."),
    positions="mpnet.embeddings.position_embeddings.weight",
    first_row=lambda values: _MPNET_FIRST_ROW,
)
ELECTRA = tensor_map.Format(
    kind="electra",
    architecture="ElectraForMaskedLM",
    model=Bert,
    values={"embedding_size": ("embedding_dim", int), **BERT.values},
    modules={name: ours for name, ours in _body("electra").items() if "pooler" not in name}
    | {"electra.embeddings_project": "encoder/widen"}
    | _head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    prefixes=("electra.", "generator_", "discriminator_"),
    # The head that finds replaced words, of published discriminators.
    ignored=r"electra\.embeddings\.(position_ids|token_type_ids)|discriminator_predictions\..*",
    tied={"generator_lm_head.weight": "encoder/words/embedding"},
    required=_GELU | {"position_embedding_type": ("absolute",)} | _REQUIRED | _TIED,
    free=_FREE,
    read=_read_electra,
    write=_write_electra,
    optional=("generator_",),
)
ENCODERS = (ROBERTA, XLM_ROBERTA, DISTILBERT, MPNET, ELECTRA)
"""The formats of this module."""
