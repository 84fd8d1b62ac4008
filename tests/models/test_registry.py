"""Every model is registered."""

import ast
import dataclasses
import pathlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from cope_jax import models
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE
from cope_jax.models.model import ModelOptions
from tests.models.cases import config


def test_every_file_registers_a_model():
    """By a line of the package: importing the file elsewhere would register it, too."""
    package = pathlib.Path(models.__file__)
    files = {
        path.stem for path in package.parent.glob("*.py") if "@MODELS.register(" in path.read_text()
    }
    lines = [
        node for node in ast.parse(package.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    imported = {
        alias.name for node in lines if node.module == models.__name__ for alias in node.names
    }
    registered = {models.MODELS.get(name).__module__.rpartition(".")[2] for name in models.names()}
    assert files == registered <= imported, "import the new file in cope_jax/models/__init__.py"


def test_every_model_names_its_config():
    for name in models.names():
        assert isinstance(models.MODELS.get(name).Config, type)


def test_create_by_name():
    def logits(tokens):
        return models.create("decoder", config(), rngs=nnx.Rngs(0))(tokens)

    assert jax.eval_shape(logits, jnp.zeros((1, 3), jnp.int32)).shape == (1, 3, config().vocab_size)
    with pytest.raises(ConfigError, match="unknown model 'decode': did you mean 'decoder'"):
        models.create("decode", config(), rngs=nnx.Rngs(0))


def test_a_config_takes_a_field_from_the_caller_then_the_task_then_its_default(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Options(ModelOptions):
        name: str = "mine"
        size: int = 3

    @dataclasses.dataclass(frozen=True)
    class Config(Options):
        vocab_size: int = 0
        max_length: int = 0
        layout: Any = None
        stochastic: bool = False
        tags: int = dataclasses.field(kw_only=True)

    monkeypatch.setitem(models.MODELS._entries, "mine", types.SimpleNamespace(Config=Config))
    task = types.SimpleNamespace(vocab_size=9, tags=2, size=7)
    config = Options().complete(task, None, 11, WHOLE, vocab_size=4)
    assert (config.vocab_size, config.max_length, config.tags, config.size) == (4, 11, 2, 3)
    assert config.stochastic is False and config.layout == WHOLE
    with pytest.raises(AttributeError, match="has no attribute 'tags'"):
        Options().complete(types.SimpleNamespace(vocab_size=9), None, 11, WHOLE)


def test_fields_of_other_shapes_are_one_clear_line():
    model = nnx.eval_shape(lambda: models.create("decoder", config(), rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"^decoder: tokens \(3,\) must have 2 axes$"):
        model(jnp.zeros(3, jnp.int32))
    for shape in ((0, 3), (2, 0)):
        with pytest.raises(
            ConfigError,
            match=re.escape(f"decoder: tokens {shape} is empty: give a sequence with a"),
        ):
            model(jnp.zeros(shape, jnp.int32))
    batch = {name: jnp.zeros((1, 3), jnp.int32) for name in ("inputs", "targets")}
    message = (
        r"^decoder: inputs \(1, 3\), targets \(1, 3\), weights \(1, 2\) must have the same 2 axes$"
    )
    with pytest.raises(ConfigError, match=message):
        model.metrics(batch | {"weights": jnp.ones((1, 2))})
