"""Wrong arguments of the Python interface, and wrong fields of configs: each is refused at the
door, in one line.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import tasks
from cope_jax.encodings import ENCODINGS, AttentionShape, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.linear_probe import ProbeConfig
from cope_jax.evaluation.contextual.word2vec import Word2VecConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.char_cnn import CharCNNConfig
from cope_jax.layers.recurrent import Cell
from cope_jax.models import MODELS
from cope_jax.training import experiment_config as training
from tools.fuzz import python_calls

SHAPE = AttentionShape(2, 4, max_length=8)
CONFIGS = (
    AttentionShape,
    BlockConfig,
    Cell,
    CharCNNConfig,
    EncodingConfig,
    ProbeConfig,
    Word2VecConfig,
)
CONFIGS += tuple(
    kind
    for name, kind in vars(training).items()
    if name.endswith("Config") and "training" in kind.__module__
)
VALUES = (None, True, 3, 2.5, "x", b"x", (), (None,), {"x": 1}, object())


def test_every_argument_of_a_wrong_type_is_refused_at_the_door():
    problems = ((case, python_calls.problem(case)) for case in python_calls.each())
    assert [f"{case.name} {case.changes}: {text}" for case, text in problems if text] == []


@pytest.mark.slow
def test_random_arguments():
    problems = ((case, python_calls.problem(case)) for case in python_calls.drawn(0, 1000))
    assert [f"{case.name} {case.changes}: {text}" for case, text in problems if text] == []


def fits(value: Any, kind: Any) -> bool:
    """True if a field with the annotation `kind` may have this value, as far as types say."""
    origin, entries = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in entries)
    if origin is Literal:
        return value in entries
    if origin is tuple:
        return isinstance(value, tuple | list) and all(fits(entry, entries[0]) for entry in value)
    if origin is float:
        return type(value) in (int, float)
    return (
        kind is Any
        or type(value) is origin
        or (isinstance(value, Mapping) and dataclasses.is_dataclass(kind))
    )


def kinds():
    """Each config class, and a function that takes the config with one field changed."""
    for name in ENCODINGS:
        encoding = ENCODINGS.get(name)
        yield (
            encoding.Config,
            lambda e=encoding, **field: e(e.Config(**field), SHAPE, rngs=nnx.Rngs(0)),
        )
    for name in tasks.TASKS:
        yield tasks.TASKS.get(name).Config, lambda name=name, **field: tasks.create(name, **field)
    required = {
        "vocab_size": 8,
        "max_length": 8,
        "num_classes": 2,
        "num_tags": 2,
        "encoding": EncodingConfig.parse("none"),
    }
    for name in MODELS:
        for kind in (MODELS.get(name).Options, MODELS.get(name).Config):
            missing = {
                f.name: f for f in dataclasses.fields(kind) if f.default is f.default_factory
            }
            known = {name: required[name] for name in missing if name in required}
            yield kind, lambda kind=kind, known=known, **field: kind(**{**known, **field})
    for kind in CONFIGS:
        known = {"num_heads": 2, "head_dim": 4} if kind is AttentionShape else {}
        yield kind, lambda kind=kind, known=known, **field: kind(**{**known, **field})


def test_every_field_of_a_wrong_type_is_refused():
    accepted, count = [], 0
    for kind, make in kinds():
        for field in dataclasses.fields(kind):
            for value in VALUES:
                if fits(value, field.type):
                    continue
                count += 1
                try:
                    make(**{field.name: value})
                except ConfigError as error:
                    if field.name in str(error) and "\n" not in str(error):
                        continue
                    accepted.append(f"{kind.__qualname__}.{field.name}={value!r}: {error}")
                except Exception as error:
                    accepted.append(
                        f"{kind.__qualname__}.{field.name}={value!r}: {type(error).__name__} {error}"
                    )
                else:
                    accepted.append(f"{kind.__qualname__}.{field.name}={value!r}")
    assert accepted == []
    assert count > 1500


def test_scalars_of_numpy_and_jax_are_numbers():
    block = BlockConfig(
        model_dim=np.int64(8),
        num_heads=jnp.int32(2),
        norm_epsilon=np.float32(0.5),
        dropout=np.int32(0),
    )
    assert block == BlockConfig(model_dim=8, num_heads=2, norm_epsilon=0.5, dropout=0.0)
    assert [
        type(n) for n in (block.model_dim, block.num_heads, block.norm_epsilon, block.dropout)
    ] == [
        int,
        int,
        float,
        float,
    ]
    assert tasks.create("flip_flop", length=np.int64(8)).length("train") == tasks.create(
        "flip_flop", length=8
    ).length("train")
