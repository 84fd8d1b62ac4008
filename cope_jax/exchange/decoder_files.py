"""GPT-2 and Llama in the files of Hugging Face's transformers: config.json and safetensors in one folder.

Names and meaning of the tensors are those of `GPT2LMHeadModel` and `LlamaForCausalLM`. Both are a `Decoder`: GPT-2 with
learned positions and LayerNorm, Llama with RoPE, RMSNorm and SwiGLU. Everything here needs the package safetensors.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.exchange import safetensors_io
from cope_jax.exchange.gpt2 import GPT2
from cope_jax.exchange.llama import LLAMA
from cope_jax.exchange.safetensors_io import CONFIG, Params
from cope_jax.exchange.tensor_map import LM_HEAD, Entry, Format
from cope_jax.models.decoder import Decoder, DecoderConfig

FORMATS = {"gpt2": GPT2, "llama": LLAMA}


def load(folder: str | Path) -> tuple[DecoderConfig, Params]:
    """Reads a model.

    Args:
      folder: with config.json and model.safetensors, or several such files with their index. Tensors may lack the
        prefix "transformer." or "model.", as those of a `GPT2Model` or `LlamaModel` do; half precision becomes float32.

    Returns:
      (the config, the parameters as nested dicts like `nnx.to_pure_dict` of a `Decoder`).

    Raises:
      ConfigError: a file is missing or damaged, of another kind of model, or does not fit the config.
    """
    folder = Path(folder)
    form, config = _read_config(folder)
    tensors = _read_tensors(folder, form)
    params: Params = {}
    shapes = _shapes(config)
    for entry in form.entries:
        if entry.paths[0] in shapes:
            parts = _assemble(entry, [shapes[path] for path in entry.paths], tensors, folder, config.num_layers)
            for path, array in zip(entry.paths, parts, strict=True):
                safetensors_io.insert(params, tuple(path.split("/")), array)
    tied = tensors.pop(LM_HEAD, None)
    if tied is not None and not np.array_equal(tied, params["embedding"]["embedding"]):
        raise ConfigError(f"{folder}: {LM_HEAD} differs from the embedding, which {CONFIG} says it is tied to")
    if tensors:
        raise ConfigError(f"{folder}: {min(tensors)!r} is no tensor of this model ({len(tensors)} such names)")
    return config, params


def save(
    folder: str | Path,
    config: DecoderConfig,
    params: Mapping[str, Any],
    architecture: str,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model that `load` and transformers read.

    The formats have no scale of the logits: another than 1, such as that of a tied table here, goes into the last norm.

    Args:
      folder: made where there is none; files of these names are overwritten.
      config: of the model.
      params: nested dicts like `nnx.to_pure_dict` of a `Decoder`.
      architecture: "gpt2" or "llama".
      tokens: what `safetensors_io.read_tokens` gives, to be kept in config.json.

    Raises:
      ConfigError: choices that the format has no words for.
    """
    form, folder = FORMATS[architecture], Path(folder)
    strange, written = form.write(config)
    if strange:
        raise ConfigError(f"the format of {architecture} has no words for {', '.join(strange)}")
    arrays: dict[str, np.ndarray] = {}
    for path, shape in _shapes(config).items():
        array = safetensors_io.look_up(params, tuple(path.split("/")))
        if array is None or np.shape(array) != shape:
            raise ConfigError(f"parameter {path} has shape {list(np.shape(array))}, and by the config {list(shape)}")
        arrays[path] = np.asarray(array)
    scale = _logit_scale(config)
    for path in ("norm/norm/scale", "norm/norm/bias"):
        if scale != 1 and path in arrays:
            arrays[path] = arrays[path] * np.asarray(scale, arrays[path].dtype)
    tensors = {}
    for entry in form.entries:
        if entry.paths[0] not in arrays:
            continue
        whole = np.concatenate([arrays[path] for path in entry.paths], axis=-1)
        for name, row in _layers(entry.name, whole):
            tensors[name] = row.T if entry.transposed else row
    safetensors_io.write(folder, {**written, **(tokens or {})}, tensors)


def read_config(folder: Path) -> DecoderConfig:
    """The config of a model, whose tensors are not read."""
    return _read_config(folder)[1]


def _read_config(folder: Path) -> tuple[Format, DecoderConfig]:
    path = folder / CONFIG
    values = safetensors_io.read_object(path)
    kind = values.get("model_type")
    if kind not in tuple(FORMATS):  # it may be a list, which no dict takes
        raise ConfigError(f"{path} is of a model of type {kind!r}, and not of {' or '.join(map(repr, FORMATS))}")
    return FORMATS[kind], FORMATS[kind].read(values, str(path))


def _logit_scale(config: DecoderConfig) -> float:
    if config.logit_scale is not None:
        return config.logit_scale
    return config.block.model_dim**-0.5 if config.tie_embeddings else 1.0


def _read_tensors(folder: Path, form: Format) -> dict[str, np.ndarray]:
    tensors = {}
    for name, array in safetensors_io.read_tensors(folder).items():
        name = name if name.startswith((form.prefix, "lm_head.")) else form.prefix + name
        if not re.fullmatch(form.ignored, name):
            tensors[name] = safetensors_io.as_float(array, name, folder)
    return tensors


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by path."""
    return {"/".join(map(str, path)): leaf.shape for path, leaf in safetensors_io.shapes(Decoder, config).items()}


def _layers(name: str, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of each layer, or of the one that is there once."""
    if "{}" not in name:
        yield name, whole
    else:
        yield from ((name.format(layer), row) for layer, row in enumerate(whole))


def _assemble(
    entry: Entry, shapes: list[tuple[int, ...]], tensors: dict[str, np.ndarray], folder: Path, num_layers: int
) -> list[np.ndarray]:
    """The parameters that lie in a tensor, or in one of each layer, which are taken out of `tensors`."""
    stacked = "{}" in entry.name
    widths = [shape[-1] for shape in shapes]
    expected = (*shapes[0][stacked:-1], sum(widths))
    rows = []
    for name in [entry.name.format(layer) for layer in range(num_layers)] if stacked else [entry.name]:
        array = tensors.pop(name, None)
        if array is None:
            raise ConfigError(f"{folder} lacks {name}")
        there = expected[::-1] if entry.transposed else expected
        if array.shape != there:
            raise ConfigError(
                f"{folder}: {name} has shape {list(array.shape)}, and by {CONFIG} {list(there)}: they are of "
                f"different models"
            )
        rows.append(array.T if entry.transposed else array)
    whole = np.stack(rows) if stacked else rows[0]
    return np.split(whole, np.cumsum(widths)[:-1], axis=-1)
