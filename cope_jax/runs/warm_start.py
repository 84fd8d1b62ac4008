"""Starts a run with the parameters of a trained model instead of initialised ones."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from cope_jax.array_types import PyTree
from cope_jax.attention import attend
from cope_jax.encodings import AttentionShape, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.exchange import safetensors_io
from cope_jax.models import MODELS
from cope_jax.models.model import deciding_options
from cope_jax.runs.load import load
from cope_jax.tasks import Task
from cope_jax.training.learner import Learner

_PROBED = 8  # number of tokens that test an encoding
Name = tuple[Any, ...]  # the path of a parameter in nested dicts


def start(
    folder: str | Path | None, learner: Learner, task: Task, encoding: str | None = None
) -> PyTree:
    """Reads the parameters of the modules that the model in `folder` shares with the learner's
    model; {} if no folder.

    The two encodings may have different parts. Common parts are copied, whatever other parts each
    encoding has. New parts are initialised as usual. Prints which parameters are new, which are
    left out and which options differ. `encoding` is the learner's encoding as text, for these
    printed lines. If None, the text comes from the learner.

    Raises:
      ConfigError: the models have no module in common, or their sizes or vocabularies differ.
    """
    if folder is None:
        return {}
    loaded, model = load(folder), learner.model
    folder, config, params = loaded.folder, loaded.config, jax.device_get(loaded.params())
    same = task.same_saved_files(folder)
    sizes = [getattr(each, "vocab_size", 0) or 0 for each in (config, model)]
    surplus = sizes[0] - sizes[1] if same else 0
    if surplus > 0:
        config, params = _without_surplus(config, params, model.vocab_size)
    stored, wanted = flatten_dict(params), flatten_dict(nnx.to_pure_dict(learner.variables()))
    if not _modules(stored) & _modules(wanted):
        raise ConfigError(
            f"{folder} shares no modules with {model.name} (it has {', '.join(params)}): "
            f"choose another --config.training.start"
        )
    taken = _common(stored, wanted, _parts(config).keys() ^ _parts(model).keys(), folder)
    if same is False:
        raise ConfigError(
            f"the vocabulary of {folder} is not the task's: use the vocabulary of {folder} in the task"
        )
    if jax.process_index() > 0:
        return unflatten_dict(taken)
    there = _text_of(config) if loaded.experiment is None else loaded.experiment.encoding
    here = _text_of(model) if encoding is None else encoding
    changed = "" if _parts(config) == _parts(model) else f"; encoding: {there} there, {here} here"
    new, left_out = _list(wanted, stored), _list(stored, wanted)
    print(f"start: {config.name} of {folder}; new: {new}; left out: {left_out}{changed}")
    if surplus > 0:
        print(
            f"start: left out the last {surplus} tokens of {folder}, which are not in its vocabulary"
        )
    if same is None and task.saved_files():
        print(
            f"warning: {folder} has no vocabulary, so it was not compared with the task's",
            file=sys.stderr,
        )
    for line in _differences(config, model, there, here):
        print(f"warning: {folder} was trained with {line}", file=sys.stderr)
    return unflatten_dict(taken)


def _common(
    stored: Mapping[Name, Any], wanted: Mapping[Name, Any], changed_parts: Set[str], folder: Path
) -> dict[Name, Any]:
    """The stored parameters that the model wants, in the same shapes.

    Raises:
      ConfigError: a common module differs elsewhere than in `changed_parts` of its encoding.
    """
    common: dict[Name, Any] = {}
    modules = _modules(stored) & _modules(wanted)
    for name in sorted({*stored, *wanted}, key=str):
        theirs, ours = stored.get(name), wanted.get(name)
        if theirs is not None and ours is not None and theirs.shape == ours.shape:
            common[name] = theirs
        elif name[0] in modules and _part_of_encoding(name) not in changed_parts:
            raise ConfigError(
                f"{'.'.join(map(str, name))} is {_text(theirs)} in {folder} and {_text(ours)} in this model: "
                f"use the same sizes and vocabulary"
            )
    return common


def _modules(names: Iterable[Name]) -> set[Any]:
    return {name[0] for name in names}


def _without_surplus(config: Any, params: PyTree, vocab_size: int) -> tuple[Any, PyTree]:
    """Cuts the token tables of a model to `vocab_size` rows; the others only pad the tables."""
    config = dataclasses.replace(config, vocab_size=vocab_size)
    shapes, stored = safetensors_io.shapes(MODELS.get(config.name), config), flatten_dict(params)
    common = {name: leaf.shape for name, leaf in shapes.items() if name in stored}
    kept = {name: stored[name][tuple(map(slice, shape))] for name, shape in common.items()}
    return config, unflatten_dict(kept)


def _part_of_encoding(name: Name) -> Any:
    """The part of an encoding that a parameter belongs to, if any."""
    return name[name.index("encoding") + 1] if "encoding" in name else None


def _parts(config: Any) -> dict[str, Any]:
    """The parts of a model's encoding, with all options."""
    return config.encoding.options() if hasattr(config, "encoding") else {}


def _text_of(config: Any) -> str:
    return (config.encoding.text() if hasattr(config, "encoding") else "") or "none"


def _list(some: Mapping[Name, Any], others: Mapping[Name, Any]) -> str:
    """Lists the modules that only `some` has, and its further parameters of common modules."""
    common_modules = _modules(others)
    names = [name if name[0] in common_modules else name[:1] for name in some if name not in others]
    return ", ".join(dict.fromkeys(".".join(map(str, name)) for name in names)) or "nothing"


def _differences(config: Any, model: Any, there: str, here: str) -> Iterator[str]:
    """Lists what the two models compute differently although their parameters have the same shapes.

    `there` is the text of the encoding of `config`, and `here` is the text of the encoding of
    `model`.
    """
    old, new = _parts(config), _parts(model)
    for name, options in old.items():
        if name not in new:
            yield f"the encoding {name}, but this model has {here}: it computes something else"
        elif options != new[name]:
            yield f"{options}, but this model has {new[name]}: it computes something else"
    theirs, ours = deciding_options(config), deciding_options(model)
    for name, options in model.encoding.parts if new else ():
        if name not in old and acts_at_once(name, options, model.block.attention_shape(_PROBED)):
            yield (
                f"the encoding {there}, but this model adds {name}, which is not zero-initialised: "
                f"it computes something else"
            )
    for name in theirs:
        if name in ours and theirs[name] != ours[name]:
            yield f"{name}={theirs[name]}, but this model has {ours[name]}: it computes something else"


def acts_at_once(name: str, options: Mapping[str, Any], shape: AttentionShape) -> bool:
    """True if an encoding with its initial parameters changes what a model computes.

    >>> shape = AttentionShape(num_heads=2, head_dim=4, max_length=8)
    >>> acts_at_once("cope", {}, shape), acts_at_once("rope", {}, shape)
    (False, True)
    """
    draw = np.random.default_rng(0).standard_normal
    x_BLD = jnp.asarray(draw((1, _PROBED, shape.width)), jnp.float32)
    q_BLHK = jnp.asarray(draw((1, _PROBED, shape.num_heads, shape.head_dim)), jnp.float32)
    k_BMGK, v_BMGK = (
        jnp.asarray(draw((1, _PROBED, shape.kv_heads, shape.head_dim)), jnp.float32)
        for _ in range(2)
    )

    def outcome(parts: Any) -> PyTree:
        encoding = EncodingConfig(parts).build(shape, rngs=nnx.Rngs(0))
        embedded_BLD = encoding.embed(x_BLD, jnp.arange(_PROBED, dtype=jnp.int32)[None])
        return embedded_BLD, attend(
            q_BLHK, k_BMGK, v_BMGK, encoding=encoding, x=x_BLD, embedded=True
        )

    pairs = zip(outcome(((name, dict(options)),)), outcome(()), strict=True)
    return any(bool(jnp.abs(ours - plain).max() > 1e-5) for ours, plain in pairs)


def _text(array: Any) -> str:
    return "absent" if array is None else "×".join(map(str, array.shape))
