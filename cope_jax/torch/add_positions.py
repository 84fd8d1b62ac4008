"""Gives a decoder of transformers another position encoding, next to the positions that it has."""

import warnings
from typing import Any

from torch import nn

from cope_jax.errors import ConfigError
from cope_jax.registry import abridged
from cope_jax.torch.torch_module import Encoding

SIZES = {"num_heads", "head_dim", "num_kv_heads", "model_dim", "max_length"}
"""Arguments of `Encoding` that a model decides."""
NAME = "cope_jax"
"""The name of our attention among those of transformers, and of the entry in a model's config."""


def add_positions(model: Any, name: str, **options: Any) -> Any:
    """Adds a position encoding to each attention layer of a model of transformers, and returns the
    model, which is changed in place.

    The model keeps its own positions. An encoding whose tables start at 0 leaves the logits
    unchanged until it is trained; a warning names the others. The parameters of the encoding are
    those of the layers' submodules `positions`.

    Args:
      model: a decoder with transformers' attention interface, such as GPT-2, Llama, Qwen or
        Mistral.
      name: an encoding, as in `Encoding`.
      **options: its options.

    Raises:
      ConfigError: the model or the encoding cannot do this.
    """
    layers = _layers(model)
    for word in SIZES & options.keys():
        raise ConfigError(f"{word} is that of the model: leave it out")
    config = model.config.get_text_config()
    encodings = [
        Encoding(
            name,
            num_heads=config.num_attention_heads,
            head_dim=_head_dim(layer),
            num_kv_heads=getattr(config, "num_key_value_heads", None),
            model_dim=config.hidden_size,
            max_length=config.max_position_embeddings,
            **options,
        )
        for layer in layers
    ]
    facts = encodings[0].facts(crops=getattr(config, "sliding_window", None) is not None)
    if facts.embeds_input:
        raise ConfigError(
            f"{name} acts on the input embeddings, which add_positions leaves alone: choose an encoding of attention"
        )
    if facts.changes:
        warnings.warn(
            f"{name} does not start at 0, so the model's logits change at once: train it before use",
            stacklevel=2,
        )
    for layer, encoding in zip(layers, encodings, strict=True):
        layer.positions = encoding.to(model.device, model.dtype)
        layer.positions_facts = facts
        if facts.reads_x:
            layer.register_forward_pre_hook(_keep_input, with_kwargs=True)
    _register()
    model.set_attn_implementation(NAME)
    model.config.cope_jax = {"parts": encodings[0].parts}
    return model


_OF_HUB = {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"}


def from_pretrained(folder: str, **options: Any) -> Any:
    """Loads a model that was saved by `save_pretrained` after `add_positions`.

    Args:
      folder: what `from_pretrained` of transformers takes: a folder or a name of the Hub.
      **options: options of that method, such as `dtype`.

    Raises:
      ConfigError: the model has no positions of `add_positions`.
    """
    import transformers

    of_hub = {name: options[name] for name in _OF_HUB & options.keys()}
    config = transformers.AutoConfig.from_pretrained(folder, **of_hub)
    stored = getattr(config, NAME, None)
    if stored is None:
        raise ConfigError(
            f"{folder} has no positions of add_positions: load it with transformers, then call add_positions"
        )
    parts = stored.get("parts") if isinstance(stored, dict) else None
    damaged = f"the entry {NAME!r} in config.json of {folder} is damaged: copy the folder again"
    if not parts or not isinstance(parts, list):
        raise ConfigError(damaged)
    for entry in parts:  # a name and its options
        if not isinstance(entry, list) or [*map(type, entry)] != [str, dict]:
            raise ConfigError(damaged)
    named = getattr(config, "architectures", None)
    name = named[0] if isinstance(named, list) and named else named
    plain: Any = getattr(transformers, str(name), None)
    is_model = isinstance(plain, type) and issubclass(plain, transformers.PreTrainedModel)
    if not is_model or plain.config_class is None:
        raise ConfigError(
            f"{folder}: config.json names {name!r}, which is no model of transformers"
        )

    def create(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        plain.__init__(self, config, *arguments, **keywords)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the initial parameters are replaced
            names, values = zip(*parts, strict=True)
            given = values[0] if len(names) == 1 else dict(parts)
            add_positions(self, "+".join(names), **given)

    extended: Any = type(plain.__name__, (plain,), {"__init__": create})
    loaded = extended.from_pretrained(folder, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
    model.__class__ = plain
    return loaded


def _layers(model: Any) -> list[Any]:
    """Returns the attention layers of a decoder.

    Raises:
      ConfigError: this is no decoder whose attention can be replaced.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise ConfigError(f"add_positions takes a model of transformers, got {abridged(model)}")
    if not all(getattr(layer, "is_causal", True) for layer in model.modules()):
        raise ConfigError(
            f"{name} has attention to later tokens or to an encoder: add_positions takes decoders only"
        )
    layers = [
        layer for layer in model.modules() if hasattr(layer, "is_causal") and _head_dim(layer)
    ]
    if not layers or not type(model)._supports_attention_backend:
        raise ConfigError(
            f"{name} does not use transformers' attention interface: choose a model that does, such as GPT-2, Llama, "
            "Qwen or Mistral"
        )
    config = model.config.get_text_config()
    if any(hasattr(layer, "positions") for layer in layers):
        raise ConfigError(f"this {name} has other positions already: load it again")
    if getattr(config, "attention_chunk_size", None):
        raise ConfigError(
            f"{name} attends within chunks, which add_positions does not support: choose another model"
        )
    return layers


def _head_dim(layer: Any) -> int:
    """Returns the width of one head, which GPT-NeoX names `head_size`; 0 means no attention."""
    return getattr(layer, "head_dim", 0) or getattr(layer, "head_size", 0)


def _keep_input(layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Keeps the input of an attention layer for encodings that read it, until `attention` takes it."""
    if layer.config._attn_implementation == NAME:
        layer.positions_input = arguments[0] if arguments else keywords["hidden_states"]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from cope_jax.torch.decoder_attention import attention, mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
