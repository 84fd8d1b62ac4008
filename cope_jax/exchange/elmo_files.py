"""ELMo's published files: `options.json`, and the weights in HDF5 under the names that `bilm-tf` gives them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.models.elmo import Elmo, ElmoConfig
from cope_jax.tokenizers.characters import NUM_CHARACTERS

OPTIONS = "options.json"


class _Entry(NamedTuple):
    """A dataset of the file: what it holds (`read` of the model's numbers), and how it is taken over (`write`)."""

    name: str
    read: Callable[[], Array]
    write: Callable[[np.ndarray], None]


def load(folder: Path) -> tuple[ElmoConfig, dict[Any, Any]]:
    """The config and the parameters of the ELMo in a folder, which has `OPTIONS` and a file `*weights.hdf5`."""
    weights = sorted(folder.glob("*weights.hdf5"))
    if not weights:
        raise ConfigError(f"{folder} has {OPTIONS} but no *weights.hdf5: put the weights of that ELMo beside it")
    model = load_elmo(folder / OPTIONS, weights[0])
    return model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def read_config(folder: Path) -> ElmoConfig:
    """The config of a model, whose weights are not read."""
    return _config(folder / OPTIONS)


def load_elmo(options_path: str | Path, weights_path: str | Path) -> Elmo:
    """An encoder from files in the official format; it has no output layer, as the files have none.

    Args:
      options_path: the JSON file of its sizes.
      weights_path: the HDF5 file of its parameters.

    Raises:
      ConfigError: a file that is missing or of another format, an option or a dataset that is missing or not known to
        this model, or weights of another size than the options say.
    """
    config = _config(Path(options_path))
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Elmo(config, rngs=nnx.Rngs(0))))
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
    with _open(weights_path, "r") as file:
        unread = _datasets(file)
        for entry in _entries(model):
            if entry.name not in file or not hasattr(file[entry.name], "shape"):
                raise ConfigError(f"{weights_path} has no dataset {entry.name!r}: it does not fit {options_path}")
            found, expected = file[entry.name].shape, entry.read().shape
            if found != expected:
                raise ConfigError(
                    f"{weights_path}: {entry.name} is of shape {list(found)}, and by {options_path} should be "
                    f"{list(expected)}"
                )
            entry.write(np.asarray(file[entry.name], np.float32))
            unread.discard(entry.name)
    if unread:
        raise ConfigError(
            f"{weights_path} has the dataset {min(unread)!r}, for which {options_path} has no place ({len(unread)} "
            f"such): they are of different models"
        )
    return model


def save_elmo(model: Elmo, options_path: str | Path, weights_path: str | Path) -> None:
    """Writes the encoder of a model, which is all but its output layer, in the official format.

    Raises:
      ConfigError: a file that cannot be written.
    """
    config = model.config
    options = {
        "lstm": {
            "use_skip_connections": config.residual,
            "projection_dim": config.projection_dim,
            "cell_clip": config.cell_clip,
            "proj_clip": config.projection_clip,
            "dim": config.cell_dim,
            "n_layers": config.num_layers,
        },
        "char_cnn": {
            "activation": "relu",
            "filters": [list(pair) for pair in config.filters],
            "n_highway": config.num_highways,
            "embedding": {"dim": config.character_dim},
            "n_characters": NUM_CHARACTERS,
            "max_characters_per_token": config.max_characters,
        },
    }
    try:
        Path(options_path).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {options_path}: {error.strerror}") from error
    with _open(weights_path, "w") as file:
        for entry in _entries(model):
            file[entry.name] = np.asarray(entry.read(), np.float32)


def _config(path: Path) -> ElmoConfig:
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the options {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: give the options.json of an ELMo") from error

    def option(*names: str) -> Any:
        value = options
        for name in names:
            if not isinstance(value, dict) or name not in value:
                raise ConfigError(f"{path} has no option {'.'.join(names)!r}: give the options.json of an ELMo")
            value = value[name]
        return value

    activation, count = option("char_cnn", "activation"), option("char_cnn", "n_characters")
    if activation != "relu":
        raise ConfigError(f"{path}: char_cnn.activation is {activation!r}, and only 'relu' is known")
    if count not in (NUM_CHARACTERS - 1, NUM_CHARACTERS):  # in training and in use
        raise ConfigError(f"{path}: char_cnn.n_characters is {count}, and should be {NUM_CHARACTERS}")
    try:
        return ElmoConfig(
            character_dim=option("char_cnn", "embedding", "dim"),
            filters=tuple((width, number) for width, number in option("char_cnn", "filters")),
            num_highways=option("char_cnn", "n_highway"),
            max_characters=option("char_cnn", "max_characters_per_token"),
            num_layers=option("lstm", "n_layers"),
            cell_dim=option("lstm", "dim"),
            projection_dim=option("lstm", "projection_dim"),
            residual=option("lstm", "use_skip_connections"),
            cell_clip=_clip(option("lstm", "cell_clip")),
            projection_clip=_clip(option("lstm", "proj_clip")),
            vocab_size=0,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} holds an option of a wrong kind ({error})") from error


def _clip(value: float | None) -> float | None:
    return None if value is None else float(value)


def _open(path: str | Path, mode: str) -> Any:
    import h5py

    try:
        return h5py.File(path, mode)
    except OSError as error:
        reason = error.strerror or "it is no HDF5 file"
        raise ConfigError(f"cannot {'read' if mode == 'r' else 'write'} the weights {path}: {reason}") from error


def _datasets(file: Any) -> set[str]:
    import h5py

    names: set[str] = set()
    file.visititems(lambda name, item: names.add(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _entries(model: Elmo) -> Iterator[_Entry]:
    """All datasets of a model's file."""
    encoder: Any = model.characters
    table = encoder.embedding_KE
    # The file has no row for the character 0 of padding words.
    yield _Entry("char_embed", lambda: table[...][1:], lambda value: _set(table, np.pad(value, ((1, 0), (0, 0)))))
    for number, (kernel, bias) in enumerate(zip(encoder.filters, encoder.biases, strict=True)):
        yield _filters(f"CNN/W_cnn_{number}", kernel)
        yield _plain(f"CNN/b_cnn_{number}", bias)
    for number, highway in enumerate(encoder.highways):
        for part, linear in (("carry", highway.carry), ("transform", highway.transform)):
            yield _plain(f"CNN_high_{number}/W_{part}", linear.kernel)
            yield _plain(f"CNN_high_{number}/b_{part}", linear.bias)
    yield _plain("CNN_proj/W_proj", encoder.projection.kernel)
    yield _plain("CNN_proj/b_proj", encoder.projection.bias)
    for direction, stack in enumerate(model.directions):
        for number, layer in enumerate(stack):
            cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            yield _matrices(f"{cell}/W_0", layer.inner_DG, layer.state_PG)
            yield _bias(f"{cell}/B", layer.bias_G)
            yield _plain(f"{cell}/W_P_0", layer.outer_NP)


def _plain(name: str, param: Any) -> _Entry:
    return _Entry(name, lambda: param[...], lambda value: _set(param, value))


def _filters(name: str, param: Any) -> _Entry:
    """A convolution over pictures of height 1."""
    return _Entry(name, lambda: param[...][None], lambda value: _set(param, value[0]))


def _matrices(name: str, inner: Any, state: Any) -> _Entry:
    """Input and state in one matrix."""

    def write(value: np.ndarray) -> None:
        rows = inner.shape[0]
        _set(inner, _exchange(value[:rows]))
        _set(state, _exchange(value[rows:]))

    return _Entry(name, lambda: _exchange(jnp.concatenate([inner[...], state[...]])), write)


def _bias(name: str, param: Any) -> _Entry:
    return _Entry(name, lambda: _exchange(param[...]), lambda value: _set(param, _exchange(value)))


def _exchange(gates: Any) -> Any:
    """From the order i, f, g, o of the gates to i, g, f, o of the file, and back."""
    i, second, third, o = jnp.split(jnp.asarray(gates), 4, axis=-1)
    return jnp.concatenate([i, third, second, o], axis=-1)


def _set(param: Any, value: Any) -> None:
    param[...] = jnp.asarray(value, jnp.float32)
