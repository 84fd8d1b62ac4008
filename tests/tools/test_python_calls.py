"""Wrong arguments of the Python interface, and wrong fields of configs: each is refused at the
door, in one line.
"""

import dataclasses
import functools
import random
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
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
from tests.models import cases as models

KEY, X = jax.random.key(0), object()
WRONG: dict[str, tuple[Any, ...]] = {
    "int": (None, "x", 2.5, True, np.True_, [], {}, 1j, float("nan"), np.ones(3), X),
    "float": (None, "x", True, [], {}, 1j, float("nan"), float("inf"), np.ones(3), X),
    "bool": (None, "x", 1, 0, 2.5, [], X),
    "str": (None, 3, True, [], b"x", X),
    "path": (3, 2.5, True, [], {}, X),
    "array": (
        None,
        3,
        "x",
        [[1.0]],
        {},
        np.ones(3),
        np.array(["x"]),
        np.ones((1, 5, 2, 8), "O"),
        X,
    ),
    "ids": (3, "x", 2.5, {}, [["a"]], [[1], [2, 3]], np.ones((1, 5)), np.ones(5, int), X),
    "positions": (3, "x", 2.5, [["a"]], np.ones((1, 5), bool), np.full((1, 5), np.nan), X),
    "mask": (3, "x", {}, np.ones((1, 1, 5, 5)), np.ones((5, 5), bool), X),
    "key": (None, 0, "x", np.zeros(2), jnp.zeros(()), jnp.uint32(0), KEY[None, None], X),
    "stops": ("x", 2.5, True, {}, [2.5], ["x"], [True], 1j, X),
    "config": (None, 3, "x", [], X),
    "object": (None, 3, "x", [], {}, X),
    "names": (5, "x", [3], {}, X),
    "sizes": (5, "x", [3], [1, 2, 2.5], [1, 2, True], {}, X),
    "tokens": (None, 3, "x", 2.5, [], ["a"], [1.5], [10**6], [-1], {}, X),
    "prompts": (None, 3, "x", [], [3], [[]], [["a"]], [[1.5]], [[10**6]], [[-1]], {}, X),
}
"""Values that an argument of this kind must not have. A kind that ends with "?" may be None."""
WRONG["ids"] += (np.full((1, 5), 2**40),)
OTHERS = (np.int64(2), np.int32(0), np.float32(0.5), jnp.int32(1), 0, 1, 3, 0.5, -1, 10**30, 1e300)
"""Values that some arguments may have."""


@functools.cache
def calls():
    """By name: a function, right arguments for it, and the kinds of those that a case replaces."""
    q = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)
    sizes, rngs = {"num_heads": 2, "head_dim": 8}, nnx.Rngs(0)
    encoding = cj.encodings.create("cope", **sizes, rngs=rngs)
    task = cj.tasks.create("flip_flop", length=8)
    model = models.model(models.config(vocab_size=task.vocab_size))
    create = {"name": "rope", **sizes, "rngs": rngs}
    sample = {"rng": np.random.default_rng(0), "n": 2}
    decoder = {"name": "decoder", "config": model.config, "rngs": rngs}
    generate = {"model": model, "prompts": [[1, 2]], "max_new_tokens": 2, "key": KEY}
    inspect = {"model": model, "vocabulary": task.vocabulary, "tokens_L": [1, 0]}
    table = (
        (
            *("attend", lambda q, k, v, **options: cj.attend(q, k, v, **options)),
            {"q": q, "k": q, "v": q, "encoding": encoding},
            "q:array k:array v:array q_positions:positions? k_positions:positions? "
            "q_segment_ids:ids? k_segment_ids:ids? embedded:bool causal:bool sequence_axis:str? "
            "head_axis:str? "
            "encoding:object mask:mask? window:int? implementation:str dropout_rate:float "
            "dropout_key:key? batch_axes:names blocks:sizes?",
        ),
        (
            *("encodings.create", cj.encodings.create, create),
            "name:str num_heads:int head_dim:int num_kv_heads:int? model_dim:int? max_length:int? "
            "rngs:object",
        ),
        ("models.create", cj.models.create, decoder, "name:str config:object rngs:object"),
        ("tasks.create", cj.tasks.create, {"name": "flip_flop"}, "name:str length:int"),
        ("tasks.names", cj.tasks.names, {}, "ability:str?"),
        ("sample", task.sample, sample, "rng:object n:int split:str"),
        ("dataset", task.dataset, {"split": "train", "n": 2}, "split:str n:int seed:int"),
        ("config", cj.config, {"name": "quick"}, "name:path training:config encoding:str"),
        ("Experiment", cj.Experiment, {"config": None}, "config:object"),
        (
            *("ExperimentConfig", cj.ExperimentConfig, {}),
            "task:config encoding:str seeds_side_by_side:int",
        ),
        ("load", cj.load, {"folder": "counting"}, "folder:path"),
        (
            *("generate", cj.generate, generate),
            "model:object prompts:prompts max_new_tokens:int key:key temperature:float top_k:int? "
            "top_p:float? stop_token:stops? padded:int",
        ),
        (
            *("inspect", cj.inspect, inspect),
            "model:object vocabulary:object tokens_L:tokens query:int layer:int? head:int?",
        ),
    )
    return {
        name: (function, arguments, dict(kind.split(":") for kind in kinds.split()))
        for name, function, arguments, kinds in table
    }


def each():
    """Every argument of every call with every value that is wrong for its kind."""
    for name, (_, _, kinds) in calls().items():
        for argument, kind in kinds.items():
            for value in WRONG[kind.removesuffix("?")]:
                if not (value is None and kind.endswith("?")):
                    yield name, {argument: value}, True


def drawn(seed, count):
    """Random calls with one to three changed arguments."""
    rng = random.Random(seed)
    values = (*(value for kind in WRONG.values() for value in kind), *OTHERS, "rope", (1, 2, 3))
    for _ in range(count):
        name = rng.choice(list(calls()))
        kinds = list(calls()[name][2])
        chosen = rng.sample(kinds, min(len(kinds), rng.choice((1, 1, 2, 3))))
        yield name, {argument: rng.choice(values) for argument in chosen}, False


def problem(name, changes, refused):
    """The mistake in the answer to a call; None for a result, or an error of one line."""
    function, arguments, _ = calls()[name]
    try:
        function(**{**arguments, **changes})
    except (ConfigError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        outside = Path(cj.__file__).parent not in Path(last.filename).parents
        if isinstance(error, TypeError) and outside:
            return f"{type(error).__name__} from {last.filename}:{last.lineno}: {error}"
        return None if str(error) and "\n" not in str(error) else f"not one line: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted" if refused else None


def test_every_argument_of_a_wrong_type_is_refused_at_the_door():
    problems = ((call, problem(*call)) for call in each())
    assert [f"{call}: {text}" for call, text in problems if text] == []


@pytest.mark.slow
def test_random_arguments():
    problems = ((call, problem(*call)) for call in drawn(0, 1000))
    assert [f"{call}: {text}" for call, text in problems if text] == []


SHAPE = AttentionShape(2, 4, max_length=8)
CONFIGS = (
    *(AttentionShape, BlockConfig, Cell, CharCNNConfig, EncodingConfig, ProbeConfig),
    *(kind for name, kind in vars(training).items() if name.endswith("Config")),
    Word2VecConfig,
)
VALUES = (None, True, 3, 2.5, "x", b"x", (), (None,), {"x": 1}, object())


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
    mistakes, count = [], 0
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
                    text = f"not one line that names it: {error}"
                except Exception as error:
                    text = f"{type(error).__name__} {error}"
                else:
                    text = "accepted"
                mistakes.append(f"{kind.__qualname__}.{field.name}={value!r}: {text}")
    assert mistakes == []
    assert count > 1500


def test_scalars_of_numpy_and_jax_are_numbers():
    numbers = {"model_dim": np.int64(8), "num_heads": jnp.int32(2), "dropout": np.int32(0)}
    block = BlockConfig(**numbers, norm_epsilon=np.float32(0.5))
    assert block == BlockConfig(model_dim=8, num_heads=2, norm_epsilon=0.5, dropout=0.0)
    fields = (block.model_dim, block.num_heads, block.norm_epsilon, block.dropout)
    assert [type(n) for n in fields] == [int, int, float, float]
    lengths = {tasks.create("flip_flop", length=n).length("train") for n in (8, np.int64(8))}
    assert len(lengths) == 1
