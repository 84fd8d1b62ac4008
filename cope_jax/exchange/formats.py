"""Reads and writes models as folders, in our own format or in a published one.

Our own format supports every registered model. It has two files. config.json has the model's name
and config, and model.safetensors has the model's parameters by path, such as
"blocks.attention.query.kernel". Reading the published files of an ELMo needs h5py.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, first_line
from cope_jax.exchange import bert_files, elmo_files, safetensors_io
from cope_jax.exchange.bert_files import BERT
from cope_jax.exchange.encoder_files import ENCODERS
from cope_jax.exchange.gpt2 import GPT2
from cope_jax.exchange.gpt_neox import GPT_NEOX
from cope_jax.exchange.layered import GEMMA2, GEMMA3, MODERNBERT
from cope_jax.exchange.llama import LLAMA
from cope_jax.exchange.llama_relatives import RELATIVES
from cope_jax.exchange.opt import OPT
from cope_jax.exchange.safetensors_io import CONFIG, WEIGHTS, Params
from cope_jax.layout import WHOLE
from cope_jax.models.encoder import EncoderConfig
from cope_jax.models.model import MODELS
from cope_jax.registry import configure, unknown
from cope_jax.storage.files import read_object

OWN, ELMO = "cope_jax", "elmo"
_VERSION = 1


def kind_of(folder: Path) -> str | None:
    """The format of the model in a folder, a name of `FORMATS` or `ELMO`; None without a model.

    Raises:
      ConfigError: config.json is damaged or has an unknown `model_type`.
    """
    if (folder / elmo_files.OPTIONS).exists():
        return ELMO
    if not safetensors_io.holds_model(folder):
        return None
    values = read_object(folder / CONFIG)
    # BERT's first files have no model_type.
    kind = values.get("model_type", None if _foreign(values) else "bert")
    if kind not in tuple(FORMATS):  # it may be a list, which is not hashable
        # No nearest name is suggested: a similar name is another architecture.
        raise ConfigError(
            f"{folder / CONFIG} has the model_type {kind!r}, which is not supported: choose a model of "
            f"{', '.join(sorted(FORMATS))}"
        )
    return str(kind)


def _foreign(values: Mapping[str, Any]) -> bool:
    """True if a config.json names the classes of another model than BERT."""
    names = values.get("architectures") or []
    return not isinstance(names, list) or not all(str(name).startswith("Bert") for name in names)


def read_config(folder: str | Path) -> Any:
    """Reads the config of the model in a folder, but no tensor.

    The model is registered under the `name` in its config.

    Raises:
      ConfigError: there is no model, the model is unknown, or its config is damaged.
    """
    folder, kind = Path(folder), _kind(folder)
    return elmo_files.read_config(folder) if kind == ELMO else FORMATS[kind].read_config(folder)


def load(folder: str | Path) -> tuple[Any, Params]:
    """Reads the config, as `read_config` does, and nested dicts of parameters, in any format.

    Raises:
      ConfigError: a file is missing or damaged, belongs to an unknown model, does not fit the
        config, or has numbers that are not finite.
    """
    folder, kind = Path(folder), _kind(folder)
    config, params = elmo_files.load(folder) if kind == ELMO else FORMATS[kind].load(folder)
    if isinstance(config, EncoderConfig):
        bert_files.check_vocabulary(folder, config.vocab_size)
    _check_finite(params, folder)
    return config, params


def _check_finite(params: Mapping[Any, Any], owner: object) -> None:
    for path, array in flatten_dict(params).items():
        if not np.isfinite(np.asarray(array)).all():
            raise ConfigError(
                f"{owner}: the parameter {_name(path)} is NaN or infinite in places: use intact weights"
            )


def _kind(folder: str | Path) -> str:
    kind = kind_of(Path(folder))
    if kind is None:
        raise ConfigError(
            f"{folder} contains no model: put {CONFIG} and {WEIGHTS}, or the files of an ELMo, there"
        )
    return kind


def save(
    folder: str | Path,
    config: Any,
    params: Mapping[Any, Any],
    form: str = OWN,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model that `load` can read; overwrites files of the same names.

    `params` are nested dicts like `nnx.to_pure_dict` of the model. `form` is a name of `FORMATS`,
    by default our own format. `tokens`, from `safetensors_io.read_tokens`, are stored in
    config.json.

    Raises:
      ConfigError: the format cannot represent this model, or the parameters do not fit the config
        or are not finite.
    """
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    model = FORMATS[form].model
    if model is not None and model.Config.name != config.name:
        raise ConfigError(
            f"the format {form} is for a {model.Config.name}, but this is a {config.name}: choose the format {OWN}"
        )
    _check_finite(params, f"cannot write {folder}")
    FORMATS[form].save(folder, config, params, tokens=tokens)


def build(config: Any, params: Mapping[Any, Any]) -> Any:
    """Makes the model of a config, with `params`.

    Absent parameters, such as heads of a published BERT, are initialised with seed 0.
    """
    return safetensors_io.create(MODELS.get(config.name), config, params)


def _load(folder: Path) -> tuple[Any, Params]:
    config = _read_config(folder)
    tensors = safetensors_io.read_tensors(folder)
    params = {}
    for path, leaf in safetensors_io.shapes(MODELS.get(config.name), config).items():
        params[path] = tensors.pop(_name(path), None)
        _check(params[path], path, leaf, f"{folder / WEIGHTS}")
    if tensors:
        raise ConfigError(
            f"{folder / WEIGHTS} and {CONFIG} do not match, because {min(tensors)!r} is not a parameter of the "
            f"{config.name} in {CONFIG} ({len(tensors)} such names): use the files of one model"
        )
    return config, unflatten_dict(params)


def _save(
    folder: str | Path,
    config: Any,
    params: Mapping[Any, Any],
    tokens: Mapping[str, Any] | None = None,
) -> None:
    names = (field.name for field in dataclasses.fields(config))
    values = {name: getattr(config, name) for name in names if name != "layout"}
    for name, value in values.items():
        if isinstance(value, EncodingConfig):
            values[name] = value.text()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values[name] = dataclasses.asdict(value)
    about = {"model_type": OWN, "version": _VERSION, "model": values, **(tokens or {})}
    try:
        parsed = _parse(json.loads(json.dumps(about)), CONFIG)
        same = parsed == dataclasses.replace(config, layout=WHOLE)
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"the format {OWN} cannot represent this config ({first_line(error)})"
        ) from error
    if not same:
        raise ConfigError(
            f"the format {OWN} cannot represent this config: give each option a value of its type"
        )
    tensors, arrays = {}, flatten_dict(params)
    for path, leaf in safetensors_io.shapes(MODELS.get(config.name), config).items():
        _check(arrays.get(path), path, leaf, "the parameters")
        tensors[_name(path)] = np.asarray(arrays[path])
    safetensors_io.write(Path(folder), about, tensors)


def _read_config(folder: Path) -> Any:
    return _parse(read_object(folder / CONFIG), str(folder / CONFIG))


def _parse(values: Mapping[str, Any], path: str) -> Any:
    model = values.get("model")
    if values.get("version") != _VERSION or not isinstance(model, dict):
        raise ConfigError(
            f"{path} is not version {_VERSION} of the format {OWN}: fetch the file again, or update this package"
        )
    name = model.get("name", "")
    if name not in tuple(MODELS):
        raise unknown("model", name, MODELS)
    if "encoding" in model:
        if not isinstance(model["encoding"], str):
            raise ConfigError(
                f"{path}.encoding must be text, such as 'cope+rope', got {model['encoding']!r}"
            )
        model = {**model, "encoding": EncodingConfig.parse(model["encoding"])}
    try:
        return configure(MODELS.get(name).Config, model, path)
    except TypeError as error:  # a field without a default is missing
        raise ConfigError(
            f"{path} has an incomplete config ({first_line(error)}): fetch the file again"
        ) from error


def _check(array: Any, path: tuple[Any, ...], leaf: Any, where: str) -> None:
    """ConfigError if the array is None or differs from the parameter in shape or type.

    float64 is also accepted as type.
    """
    if array is None:
        raise ConfigError(f"{_name(path)} is missing from {where}: use the weights of this config")
    if array.shape != leaf.shape or array.dtype not in (leaf.dtype, np.float64):
        raise ConfigError(
            f"{_name(path)} in {where} is {array.dtype.name}{list(array.shape)}, but the config needs "
            f"{leaf.dtype.name}{list(leaf.shape)}: use the weights of this config"
        )


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


class OwnFormat:
    """Our own format, with the methods of `tensor_map.Format`, for any model."""

    kind, model = OWN, None
    read_config = staticmethod(_read_config)
    load = staticmethod(_load)
    save = staticmethod(_save)


_DECODERS = (GPT2, LLAMA, *RELATIVES, GPT_NEOX, OPT, GEMMA2, GEMMA3)
FORMATS: dict[str, Any] = {
    form.kind: form for form in (OwnFormat, BERT, *ENCODERS, MODERNBERT, *_DECODERS)
}
"""The formats by the `model_type` in config.json."""
