"""Reads and writes the files that formats share: config.json, and tensors in safetensors files."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from cope_jax.errors import ConfigError, StorageError, first_line
from cope_jax.models.model import overlay
from cope_jax.registry import configure
from cope_jax.storage.files import inside, read_object, replacing_pair

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id")
"""Fields of published configs with the numbers of the tokens that begin and end a text."""
ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
"""Hugging Face's names of activations → our names."""
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
Params = dict[Any, Any]
T = TypeVar("T")


def holds_model(folder: Path) -> bool:
    """True if the folder has tensors in safetensors files."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def typed(kind: type[T], values: Mapping[str, Any], path: str) -> T:
    """Makes a dataclass `kind` from the values of its fields; ignores values of other names.

    Raises:
      ConfigError: a value has the wrong type, or a field without a default has no value.

    >>> Size = dataclasses.make_dataclass("Size", [("n_layer", int)])
    >>> typed(Size, {"n_layer": 2, "use_cache": True}, "config.json")
    Size(n_layer=2)
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # T is always a dataclass
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{path} lacks {field.name!r}: use a complete config")
    known = {field.name: values[field.name] for field in fields if field.name in values}
    return configure(kind, known, path)


def typed_value(
    name: str, default: Any, values: Mapping[str, Any], path: str, kind: Any = None
) -> Any:
    """Returns the value `name` of a config, or `default`; its type must be `kind`, by default that
    of `default`.
    """
    fields = [(name, kind or type(default), default)]
    return getattr(typed(dataclasses.make_dataclass("Value", fields), values, path), name)


def require(values: Mapping[str, Any], path: str, **known: tuple[Any, ...]) -> None:
    """ConfigError for a value that is not in `known`; if absent, a value is its first choice."""
    for name, choices in known.items():
        if values.get(name, choices[0]) not in choices:
            raise ConfigError(
                f"{path}: {name}={values[name]!r} is not supported; choose a model with "
                f"{' or '.join(map(repr, choices))}"
            )


def read_tokens(folder: Path) -> dict[str, Any]:
    """Reads the fields `TOKENS` from generation_config.json or else config.json.

    Returns:
      The fields that were found, by name; each is the number of a token or a list of numbers.

    Raises:
      ConfigError: a file cannot be read, or a value is neither a number nor a list of numbers.
    """
    tokens: dict[str, Any] = {}
    for file in (folder / GENERATION, folder / CONFIG):
        values = read_object(file) if file.exists() else {}
        for name in TOKENS:
            value = values.get(name)
            if value is None or name in tokens:
                continue
            if not all(
                type(number) is int for number in (value if isinstance(value, list) else [value])
            ):
                raise ConfigError(f"{file}: {name} must be the number of a token, got {value!r}")
            tokens[name] = value
    return tokens


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a folder, by name, from one file or from the files that an index lists.

    Raises:
      ConfigError: a file is missing or damaged, or does not have a tensor that the index lists for
        this file.
    """
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return _read_file(folder / WEIGHTS)
    places = read_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(f, str) and "/" not in f for f in places.values()
    ):
        raise ConfigError(
            f"{folder / INDEX} has no weight_map from tensors to files in the same folder: fetch the file again"
        )
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(places.values())):
        in_file = _read_file(inside(folder, file, links=True))
        for name in (name for name, file_of_name in places.items() if file_of_name == file):
            if name not in in_file:
                raise ConfigError(
                    f"{folder / file} lacks {name}, which {INDEX} lists: fetch the two files again"
                )
            tensors[name] = in_file.pop(name)
        if in_file:
            raise ConfigError(
                f"{folder / file} has {min(in_file)}, which {INDEX} does not list: fetch the files again"
            )
    return tensors


def _read_file(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        if path.exists() and not path.is_file():  # a named pipe would be waited for
            raise ValueError("it is no regular file")
        return dict(load_file(path))
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path} ({first_line(error)}): fetch the file again"
        ) from error


def as_float(array: np.ndarray, name: str, folder: Path) -> np.ndarray:
    """Converts a tensor to float32; a float64 tensor stays unchanged.

    Raises ConfigError if the type of the tensor is not floating-point, with 16 bits or more.
    """
    if array.dtype in (np.float32, np.float64):
        return array
    # 8 bits are a part of a number, whose scale is elsewhere.
    if array.dtype not in (np.float16, jnp.bfloat16):
        raise ConfigError(
            f"{name} in {folder} has type {array.dtype.name}, but quantised weights are not supported: use "
            "floating-point weights"
        )
    return array.astype(np.float32)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors: see `replacing_pair`.

    Creates the folder if it is missing.

    Raises:
      ConfigError: the folder cannot be written to.
      StorageError: the disk is full or read-only.
    """
    from safetensors.numpy import save_file

    try:
        with replacing_pair(folder / WEIGHTS, folder / CONFIG) as (partial, partial_config):
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            partial_config.write_text(text, encoding="utf-8")
            contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
            save_file(contiguous, partial, metadata={"format": "pt"})
    except StorageError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or first_line(error)}): choose another folder"
        ) from error


def shapes(kind: type, config: Any) -> dict[tuple[Any, ...], Any]:
    """The shape and type of each parameter of a model, by path."""
    state = nnx.state(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))), nnx.Param)
    return {path: leaf for path, leaf in nnx.to_flat_state(state)}


def create(kind: Any, config: Any, params: Mapping[Any, Any]) -> Any:
    """Makes a model with `params`, nested dicts like `nnx.to_pure_dict` of the model.

    Absent parameters are initialised with seed 0. ConfigError: a parameter has another shape than
    the config says.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    arrays, leaves = flatten_dict(params), dict(nnx.to_flat_state(state))
    for path, array in arrays.items():
        if path in leaves and array.shape != leaves[path].shape:
            raise ConfigError(
                f"{'.'.join(map(str, path))} has shape {list(array.shape)}, but the config needs "
                f"{list(leaves[path].shape)}: use the vocabulary and the parameters of this model"
            )
    if leaves.keys() - arrays.keys():
        # Initialised under jit, because one operation after another takes many times as long.
        drawn = jax.jit(lambda: nnx.to_pure_dict(nnx.state(kind(config, rngs=nnx.Rngs(0)))))()
        params = overlay(drawn, params)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, dict(params)))
    return nnx.merge(graphdef, state)
