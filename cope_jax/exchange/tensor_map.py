"""Reads and writes folders in the format of transformers: config.json and the tensors.

In this module, "their" means "of transformers", and "our" means "of cope_jax".
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from cope_jax.errors import ConfigError
from cope_jax.exchange import safetensors_io
from cope_jax.exchange.safetensors_io import ACTIVATIONS, CONFIG, THEIR_ACTIVATIONS, Params
from cope_jax.models.decoder import DecoderConfig
from cope_jax.models.model import deciding_options
from cope_jax.storage.files import read_object

ADAPTER = "adapter_config.json"
TIED_HEAD = {"lm_head.weight": "embedding/embedding"}
"""Output layer in transformers → our embedding, to which an output layer may be tied."""
_LEAVES = dict.fromkeys(("embedding", "table", "scale", "kernel"), "weight")
_LEAVES |= {"bias": "bias", "bias_V": "bias"}
"""Names of parameters in our modules → names in transformers."""
REQUIRED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None, {}),
    "auto_map": (None, {}),  # the model runs code from its folder
    "is_encoder_decoder": (False,),
}
"""Values that some fields of config.json must have in every architecture, as `Format.required`."""
DECODER: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "layer_types"), (None,)),
}
"""Further required values of GPT-2 and Llama, which transformers reads outside of its models."""
_EARLIER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Ends of names in old files → ends in current files."""


class _Entry(NamedTuple):
    """A tensor of a file, or one for each layer if `name` has {} in place of its number.

    The tensor concatenates our parameters at `paths` along the last axis. If `transposed`, it is
    [outputs, inputs]. With `heads`, each head has its features of all parameters in a row.
    """

    name: str
    paths: list[str]
    transposed: bool
    heads: int = 1

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The tensor, not yet transposed, of our parameters."""
        rows = [array.reshape(*array.shape[:-1], self.heads, -1) for array in arrays]
        whole = np.concatenate(rows, axis=-1)
        return whole.reshape(*whole.shape[:-2], -1)

    def divide(self, whole: np.ndarray, widths: list[int]) -> list[np.ndarray]:
        """Our parameters, with these widths, of the tensor."""
        rows = whole.reshape(*whole.shape[:-1], self.heads, -1)
        parts = np.split(rows, np.cumsum(widths)[:-1] // self.heads, axis=-1)
        return [array.reshape(*array.shape[:-2], -1) for array in parts]

    def names(self, num_layers: int) -> list[str]:
        if not self.stacked:
            return [self.name]
        return [self.name.format(layer) for layer in range(num_layers)]

    @property
    def stacked(self) -> bool:
        return "{}" in self.name


SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": ("vocab_size", int),
    "max_position_embeddings": ("max_length", int),
    "hidden_size": ("block.model_dim", int),
    "intermediate_size": ("block.mlp_dim", int),
    "num_hidden_layers": ("num_layers", int),
    "num_attention_heads": ("block.num_heads", int),
}
"""The fields of sizes that most of transformers' models share, as in `Format.values`."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of one architecture: its tensors, and how its config is read and written.

    Attributes:
      kind: the `model_type` in config.json.
      architecture: the name of the class in transformers.
      model: our class of the model.
      values: what is read from config.json: its name → (our field, type, default of transformers).
        Our field is one of the config or, as "block.dropout", of its block. Two names of one field
        must have one value.
      modules: maps the path of their module to the path of our module. If their module concatenates
        the parameters of several modules, spaces separate the paths of our modules. {} is the
        layer's number.
      prefixes: prefixes of the names of tensors. A name without any of these prefixes gets the
        first prefix.
      required: the only values that a field of config.json may have, for fields that would change
        the numbers. An absent field counts as the first value.
      free: names of options, as `_function` gives them, that the format need not represent, because
        they do not change the numbers or because `adapt` takes care of them.
      ignored: regular expression of the names of tensors to ignore.
      tied: maps redundant tensors of a file to the parameters that they must equal.
      read: makes our config from its fields and those of its block, from all values of config.json,
        and from the path of this file, which errors mention.
      write: returns values of config.json for our config that differ from those of `values`, as far
        as the format can represent it. `save` compares what `read` makes of them with the config.
      adapt: converts our parameters to parameters that the format can represent.
      optional: prefixes of the names of tensors that may be absent, both in the file and in our
        parameters.
      plain: prefixes of the names of matrices that the file stores as [inputs, outputs], like our
        parameters. The file stores all other matrices transposed.
      interleaved: the module whose tensors have the parameters of our modules head by head.
      lessened: regular expression of the names of tensors that are lower by 1 in the file.
      unused: names of scales that the file lacks, because the model does not use them.
      positions: the name of a table whose row of position 0 is not the first.
      first_row: returns the row of position 0 in this table, from the values of config.json. The
        rows before it are not read, because no token that counts uses them; they are written as 0.
    """

    kind: str
    architecture: str
    model: type
    values: Mapping[str, tuple[Any, ...]]
    modules: Mapping[str, str]
    prefixes: tuple[str, ...]
    ignored: str
    tied: Mapping[str, str]
    read: Callable[[dict[str, Any], dict[str, Any], Mapping[str, Any], str], Any]
    write: Callable[[Any], dict[str, Any]]
    required: Mapping[str, tuple[Any, ...]]
    free: frozenset[str] = frozenset()
    adapt: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda config, params: params
    optional: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    interleaved: str | None = None
    lessened: str = ""
    unused: tuple[str, ...] = ()
    positions: str = ""
    first_row: Callable[[Mapping[str, Any]], int] = lambda values: 0

    def read_config(self, folder: Path) -> Any:
        """Reads the config of a model, but not its tensors."""
        path = folder / CONFIG
        values = read_object(path)
        if (folder / ADAPTER).exists():  # transformers would add it to the weights
            raise ConfigError(
                f"{folder} has an adapter ({ADAPTER}): merge it into the weights, and remove the file"
            )
        return self._read(values, str(path))

    def _read(self, values: Mapping[str, Any], path: str) -> Any:
        safetensors_io.require(values, path, **REQUIRED, **self.required)
        try:
            return self.read(*_fields(self.values, values, path), values, path)
        except ConfigError as error:
            raise error if path in str(error) else ConfigError(f"{path}: {error}") from error

    def load(self, folder: Path) -> tuple[Any, Params]:
        """Reads (the config, the parameters as nested dicts) from a folder.

        Raises:
          ConfigError: a file or tensor is missing or damaged, or does not fit the config.
        """
        config, tensors = self.read_config(folder), {}
        for name, array in safetensors_io.read_tensors(folder).items():
            name = name if name.startswith(self.prefixes) else self.prefixes[0] + name
            for old, new in _EARLIER.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
            if name in tensors:
                raise ConfigError(
                    f"{folder} has the tensor {name!r} under two names: use the files of one model"
                )
            if not re.fullmatch(self.ignored, name):
                array = safetensors_io.as_float(array, name, folder)
                lower = re.fullmatch(self.lessened, name)
                tensors[name] = array + np.float32(1) if lower else array
        for name in self.unused:
            tensors.setdefault(name, np.ones(config.block.model_dim, np.float32))
        if self.positions in tensors:
            first = self.first_row(read_object(folder / CONFIG))
            tensors[self.positions] = tensors[self.positions][first:]
        params: dict[str, np.ndarray] = {}
        wanted = self._shapes(config)
        for entry in self._entries(wanted, config):
            if entry.name.startswith(self.optional) and entry.name not in tensors:
                continue
            shapes = [wanted[path] for path in entry.paths]
            parts = _parts(entry, shapes, tensors, folder, config.num_layers)
            params |= zip(entry.paths, parts, strict=True)
        for theirs, ours in self.tied.items():
            tied = tensors.pop(theirs, None)
            if tied is not None and not np.array_equal(tied, params.get(ours, ())):
                raise ConfigError(
                    f"{folder}: {theirs} differs from {ours}, although {CONFIG} ties them; use the files of one model"
                )
        if tensors:
            raise ConfigError(
                f"{folder}: {min(tensors)!r} is not a tensor of this model ({len(tensors)} such names); use the "
                f"weights that belong to {CONFIG}"
            )
        return config, unflatten_dict(params, sep="/")

    def save(
        self,
        folder: str | Path,
        config: Any,
        params: Mapping[str, Any],
        tokens: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a model that `load` and transformers can read, with `tokens` in its config.json.

        Raises:
          ConfigError: the format cannot represent the config, or the parameters do not fit it.
        """
        written, wanted = self._written(config), self._shapes(config)
        by_path = flatten_dict(self.adapt(config, params), sep="/")
        tensors = {}
        for entry in self._entries(wanted, config):
            arrays = {path: by_path.get(path) for path in entry.paths}
            if entry.name.startswith(self.optional) and arrays[entry.paths[0]] is None:
                continue
            for path, array in arrays.items():
                if array is None or np.shape(array) != wanted[path]:
                    raise ConfigError(
                        f"parameter {path} has shape {list(np.shape(array))}, but the config needs "
                        f"{list(wanted[path])}: give the parameters of this config"
                    )
            whole = entry.join([np.asarray(array) for array in arrays.values()])
            rows = whole if entry.stacked else whole[None]
            for name, row in zip(entry.names(config.num_layers), rows, strict=True):
                row = row - np.asarray(1, row.dtype) if re.fullmatch(self.lessened, name) else row
                tensors[name] = row.T if entry.transposed else row
        for name in self.unused:
            del tensors[name]
        if self.positions in tensors:
            unused = ((self.first_row(written), 0), (0, 0))
            tensors[self.positions] = np.pad(tensors[self.positions], unused)
        safetensors_io.write(Path(folder), {**written, **(tokens or {})}, tensors)

    def _written(self, config: Any) -> dict[str, Any]:
        """The values of config.json. ConfigError: `read` would make another function of them."""
        written = {"architectures": [self.architecture], "model_type": self.kind}
        try:
            written |= _values(self.values, config) | self.write(config)
            asked, said = _function(config), _function(self._read(written, CONFIG))
        except ConfigError as error:
            raise ConfigError(
                f"the format {self.kind} cannot represent this config ({error}): choose the format cope_jax"
            ) from error
        # An option of a part that the format lacks is not in `said`.
        decided = {name: value for name, value in asked.items() if name not in self.free}
        changed = [name for name, value in decided.items() if said.get(name, value) != value]
        lost = [f"{name}={asked[name]!r}" for name in changed]
        if lost:
            raise ConfigError(
                f"the format {self.kind} cannot represent {', '.join(lost)}: choose the format cope_jax"
            )
        return written

    def _shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by path."""
        leaves = safetensors_io.shapes(self.model, config)
        return {"/".join(map(str, path)): leaf.shape for path, leaf in leaves.items()}

    def _entries(self, wanted: Mapping[str, Any], config: Any) -> Iterator[_Entry]:
        """Yields the tensors of a model; the keys of `wanted` are the paths of its parameters."""
        for theirs, ours in self.modules.items():
            heads = config.block.num_heads if theirs == self.interleaved else 1
            if ours in wanted:
                yield _Entry(f"{theirs}.weight", [ours], False)
            for leaf, end in _LEAVES.items():
                paths = [f"{module}/{leaf}".lstrip("/") for module in ours.split(" ")]
                if paths[0] in wanted:
                    transposed = leaf == "kernel" and not theirs.startswith(self.plain)
                    yield _Entry(f"{theirs}.{end}", paths, transposed, heads)


def _parts(
    entry: _Entry,
    wanted: list[tuple[int, ...]],
    tensors: dict[str, np.ndarray],
    folder: Path,
    num_layers: int,
) -> list[np.ndarray]:
    """Reads the parameters of an entry, of shapes `wanted`, and removes it from `tensors`."""
    widths = [shape[-1] for shape in wanted]
    expected = (*wanted[0][entry.stacked : -1], sum(widths))
    rows = []
    for name in entry.names(num_layers):
        array = tensors.pop(name, None)
        if array is None:
            raise ConfigError(f"{folder} lacks {name}: use the weights that belong to {CONFIG}")
        there = expected[::-1] if entry.transposed else expected
        if array.shape != there:
            raise ConfigError(
                f"{folder}: {name} has shape {list(array.shape)}, but {CONFIG} needs {list(there)}; use the files of "
                "one model"
            )
        rows.append(array.T if entry.transposed else array)
    whole = np.stack(rows) if entry.stacked else rows[0]
    return entry.divide(whole, widths)


def with_scaled_norm(config: DecoderConfig, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves a decoder's scale of logits, which the formats lack, into its last norm."""
    scale = config.logit_scale
    if scale is None:
        scale = config.block.model_dim**-0.5 if config.tie_embeddings else 1.0
    if scale == 1:
        return params
    norm = jax.tree.map(
        lambda array: np.asarray(array) * np.asarray(scale, array.dtype), params["norm"]
    )
    return {**params, "norm": norm}


def _function(config: Any) -> dict[str, Any]:
    """The options that decide what a model computes, by name, with all options of its encoding."""
    parts = config.encoding.options()
    options = {
        f"{name}.{field}": value
        for name, chosen in parts.items()
        for field, value in vars(chosen).items()
    }
    ours = {"encoding": "+".join(parts) or "none", "vocab_size": config.vocab_size}
    return ours | options | deciding_options(config)


def _fields(
    names: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of our config and those of its block, from the values of config.json."""
    kinds = [
        (name, kind, *map(lambda value: dataclasses.field(default=value), default))
        for name, (_, kind, *default) in names.items()
    ]
    read: Any = safetensors_io.typed(dataclasses.make_dataclass("Values", kinds), values, path)
    fields: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    name_of: dict[str, str] = {}
    for name, (field, *_) in names.items():
        value = getattr(read, name)
        if (other := name_of.setdefault(field, name)) != name and getattr(read, other) != value:
            raise ConfigError(
                f"{path}: {other} and {name} differ, but must be equal; choose another model"
            )
        value = ACTIVATIONS[value] if field == "block.activation" else value
        fields[field.startswith("block.")][field.removeprefix("block.")] = value
    return fields


def _values(names: Mapping[str, tuple[Any, ...]], config: Any) -> dict[str, Any]:
    """The values of config.json that `_fields` reads, and those that all architectures have."""
    values = {name: operator.attrgetter(field)(config) for name, (field, *_) in names.items()}
    for name, (field, *_) in names.items():
        if field == "block.activation":
            values[name] = THEIR_ACTIVATIONS.get(values[name], "gelu")
    stddev = config.block.initial_stddev
    return values | {"initializer_range": 0.02 if stddev is None else stddev}


def table_length(config: Any) -> int:
    """The number of learned positions of our config."""
    return dict(config.encoding.parts).get("learned", {}).get("max_length") or config.max_length
