"""Reads and writes ELMo's published files: `options.json`, and HDF5 with the names of `bilm-tf`."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from cope_jax.errors import ConfigError, StorageError, first_line
from cope_jax.models.elmo import Elmo, ElmoConfig
from cope_jax.models.model import deciding_options
from cope_jax.registry import configure
from cope_jax.storage.files import read_object, replacing_pair
from cope_jax.tokenizers.characters import NUM_CHARACTERS

OPTIONS = "options.json"
_FIELDS = {
    "char_cnn.embedding.dim": "character_dim",
    "char_cnn.filters": "filters",
    "char_cnn.n_highway": "num_highways",
    "char_cnn.max_characters_per_token": "max_characters",
    "lstm.n_layers": "num_layers",
    "lstm.dim": "cell_dim",
    "lstm.projection_dim": "projection_dim",
    "lstm.use_skip_connections": "residual",
    "lstm.cell_clip": "cell_clip",
    "lstm.proj_clip": "projection_clip",
}
"""ELMo's options → the fields of our config."""


class _Entry(NamedTuple):
    """A dataset of the weights file, which concatenates the parameters `params`.

    `there` converts the concatenated parameters to the dataset, and `here` converts the dataset
    back.
    """

    name: str
    params: tuple[Any, ...]
    there: Callable[[np.ndarray], np.ndarray] = lambda param: param
    here: Callable[[np.ndarray], np.ndarray] = lambda dataset: dataset

    def read(self) -> np.ndarray:
        arrays = [np.asarray(param[...], np.float32) for param in self.params]
        return self.there(np.concatenate(arrays))

    def write(self, dataset: np.ndarray) -> None:
        ends = np.cumsum([len(param) for param in self.params])
        for param, rows in zip(self.params, np.split(self.here(dataset), ends[:-1]), strict=True):
            param[...] = jnp.asarray(rows, jnp.float32)


def load(folder: Path) -> tuple[ElmoConfig, dict[Any, Any]]:
    """Reads (config, parameters) of an ELMo from a folder with `OPTIONS` and `*weights.hdf5`."""
    weights = sorted(folder.glob("*weights.hdf5"))
    if not weights:
        raise ConfigError(
            f"{folder} has {OPTIONS} but no *weights.hdf5: put the weights of this ELMo there too"
        )
    model = load_elmo(folder / OPTIONS, weights[0])
    return model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def read_config(folder: Path) -> ElmoConfig:
    """Reads the config of a model, but not its weights."""
    return _config(folder / OPTIONS)


def load_elmo(options_path: str | Path, weights_path: str | Path) -> Elmo:
    """Reads an encoder from published options and weights.

    The encoder has no output layer: published weights have none.

    Raises:
      ConfigError: a file is missing or has another format, an option or a dataset is missing or not
        supported, or the sizes of the weights differ from the options.
    """
    config = _config(Path(options_path))
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Elmo(config, rngs=nnx.Rngs(0))))
    with _open(weights_path) as file:
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        if numbers > Path(weights_path).stat().st_size:  # before they are allocated
            raise ConfigError(
                f"{weights_path} is too small for the {numbers:,} numbers of {options_path}: use the two files of one "
                "model"
            )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        model = nnx.merge(graphdef, zeros)
        try:
            _read_weights(model, file, weights_path, options_path)
        except ConfigError:
            raise
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{weights_path} is damaged ({reason}): download it again") from error
    return model


def _read_weights(
    model: Elmo, file: Any, weights_path: str | Path, options_path: str | Path
) -> None:
    unread = _datasets(file)
    for entry in _entries(model):
        if entry.name not in unread:
            raise ConfigError(
                f"{weights_path} has no dataset {entry.name!r}, which {options_path} needs: use the two files of one "
                "model"
            )
        dataset = file[entry.name]
        if dataset.external or dataset.is_virtual:  # the bytes of any file could become weights
            raise ConfigError(
                f"{weights_path} has the data of {entry.name!r} in another file: use weights that are in one file"
            )
        shape, expected = dataset.shape, entry.read().shape
        if shape != expected:
            raise ConfigError(
                f"{weights_path}: {entry.name} has shape {list(shape or ())}, but {options_path} needs "
                f"{list(expected)}; use the two files of one model"
            )
        entry.write(np.asarray(dataset, np.float32))
        unread.discard(entry.name)
    if unread:
        raise ConfigError(
            f"{weights_path} has the dataset {min(unread)!r}, which is not in the model of {options_path} "
            f"({len(unread)} such datasets): use the two files of one model"
        )


def save_elmo(model: Elmo, options_path: str | Path, weights_path: str | Path) -> None:
    """Writes the options of a model, and its weights without the output layer: see `replacing_pair`.

    Raises ConfigError if a file cannot be written, and StorageError if the disk is full.
    """
    import h5py

    values = {"char_cnn.activation": "relu", "char_cnn.n_characters": NUM_CHARACTERS}
    values |= {name: getattr(model.config, field) for name, field in _FIELDS.items()}
    options = unflatten_dict(values, sep=".")
    if deciding_options(_parse(options, OPTIONS)) != deciding_options(model.config):
        raise ConfigError("ELMo's files cannot represent this config: choose the format cope_jax")
    files = Path(options_path), Path(weights_path)
    for path in files:
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path} (there is no such folder): choose another path")
    try:
        with replacing_pair(files[1], files[0]) as (partial, partial_options):
            partial_options.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
            with h5py.File(partial, "w", locking=False) as file:  # `replacing` has a lock
                for entry in _entries(model):
                    file[entry.name] = entry.read()
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(
            f"cannot write {' and '.join(map(str, files))} ({reason}): choose other paths"
        ) from error


def _config(path: Path) -> ElmoConfig:
    return _parse(read_object(path), str(path))


def _parse(values: Mapping[str, Any], path: str) -> ElmoConfig:
    options = flatten_dict(values, sep=".")
    for name in ("char_cnn.activation", "char_cnn.n_characters", *_FIELDS):
        if name not in options:
            raise ConfigError(f"{path} has no option {name!r}: give the options.json of an ELMo")
    activation, count = options["char_cnn.activation"], options["char_cnn.n_characters"]
    if activation != "relu":
        raise ConfigError(
            f"{path}: char_cnn.activation is {activation!r}, but must be 'relu'; choose another ELMo"
        )
    # One number in training, the other in inference.
    if count not in (NUM_CHARACTERS - 1, NUM_CHARACTERS):
        raise ConfigError(
            f"{path}: char_cnn.n_characters is {count}, but must be {NUM_CHARACTERS}; choose another ELMo"
        )
    fields = {field: options[name] for name, field in _FIELDS.items()}
    return configure(ElmoConfig, {**fields, "vocab_size": 0}, path)


def _open(path: str | Path) -> Any:
    import h5py

    try:
        if Path(path).is_fifo():  # it would be waited for
            raise OSError
        return h5py.File(path, "r")
    except OSError as error:
        reason = error.strerror or "it is not an HDF5 file"
        raise ConfigError(
            f"cannot read the weights {path} ({reason}): give the weights of an ELMo"
        ) from error


def _datasets(file: Any) -> set[str]:
    import h5py

    names: set[str] = set()
    file.visititems(lambda name, item: names.add(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _entries(model: Elmo) -> Iterator[_Entry]:
    """All datasets in the weights file of a model."""
    encoder: Any = model.characters
    # The file has no row for the character 0 of padding words.
    yield _Entry(
        "char_embed",
        (encoder.embedding_KE,),
        lambda table: table[1:],
        lambda table: np.pad(table, ((1, 0), (0, 0))),
    )
    for number, (kernel, bias) in enumerate(zip(encoder.filters, encoder.biases, strict=True)):
        # The file has 2D convolutions over images of height 1.
        yield _Entry(
            f"CNN/W_cnn_{number}", (kernel,), lambda kernel: kernel[None], lambda kernel: kernel[0]
        )
        yield _Entry(f"CNN/b_cnn_{number}", (bias,))
    for number, highway in enumerate(encoder.highways):
        for gate, linear in (("carry", highway.carry), ("transform", highway.transform)):
            yield _Entry(f"CNN_high_{number}/W_{gate}", (linear.kernel,))
            yield _Entry(f"CNN_high_{number}/b_{gate}", (linear.bias,))
    yield _Entry("CNN_proj/W_proj", (encoder.projection.kernel,))
    yield _Entry("CNN_proj/b_proj", (encoder.projection.bias,))
    for direction, stack in enumerate(model.directions):
        for number, layer in enumerate(stack):
            cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            yield _Entry(f"{cell}/W_0", (layer.inner_DG, layer.state_PG), _exchange, _exchange)
            yield _Entry(f"{cell}/B", (layer.bias_G,), _exchange, _exchange)
            yield _Entry(f"{cell}/W_P_0", (layer.outer_NP,))


def _exchange(gates: np.ndarray) -> np.ndarray:
    """Converts between our order of the gates i, f, g, o and the file's i, g, f, o."""
    i, second, third, o = np.split(gates, 4, axis=-1)
    return np.concatenate([i, third, second, o], axis=-1)
