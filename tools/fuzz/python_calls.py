"""Calls of the Python interface with wrong arguments: a wrong type has an answer at the door, in
one clear line.
"""

import functools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import cope_jax as cj
from cope_jax.errors import ConfigError
from tests.models import cases as models

KEY = jax.random.key(0)
WRONG: dict[str, tuple[Any, ...]] = {
    "int": (None, "x", 2.5, True, np.True_, [], {}, 1j, float("nan"), np.ones(3), object()),
    "float": (None, "x", True, [], {}, 1j, float("nan"), float("inf"), np.ones(3), object()),
    "bool": (None, "x", 1, 0, 2.5, [], object()),
    "str": (None, 3, True, [], b"x", object()),
    "path": (3, 2.5, True, [], {}, object()),
    "array": (
        None,
        3,
        "x",
        [[1.0]],
        {},
        np.ones(3),
        np.array(["x"]),
        np.ones((1, 5, 2, 8), object),
        object(),
    ),
    "ids": (
        3,
        "x",
        2.5,
        {},
        [["a"]],
        [[1], [2, 3]],
        np.ones((1, 5)),
        np.ones(5, int),
        np.full((1, 5), 2**40),
        object(),
    ),
    "mask": (3, "x", {}, np.ones((1, 1, 5, 5)), np.ones((5, 5), bool), object()),
    "key": (None, 0, "x", np.zeros(2), jnp.zeros(()), jnp.uint32(0), KEY[None, None], object()),
    "stops": ("x", 2.5, True, {}, [2.5], ["x"], [True], 1j, object()),
    "config": (None, 3, "x", [], object()),
    "object": (None, 3, "x", [], {}, object()),
    "names": (5, "x", [3], {}, object()),
    "sizes": (5, "x", [3], [1, 2, 2.5], [1, 2, True], {}, object()),
    "tokens": (None, 3, "x", 2.5, [], ["a"], [1.5], [10**6], [-1], {}, object()),
    "prompts": (None, 3, "x", [], [3], [[]], [["a"]], [[1.5]], [[10**6]], [[-1]], {}, object()),
}
"""Values that an argument of this kind must not have. A kind that ends with "?" may be None."""
OTHERS = (
    np.int64(2),
    np.int32(0),
    np.float32(0.5),
    jnp.int32(1),
    0,
    1,
    3,
    0.5,
    -1,
    10**30,
    1e300,
    "rope",
    (1, 2, 3),
)
"""Values that some arguments may have."""


class Call(NamedTuple):
    """A function, right arguments for it, and the kind of each argument that a case may replace."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    kinds: Mapping[str, str]


class Case(NamedTuple):
    """One call with wrong arguments; `refused` says whether one of them can never be right."""

    name: str
    changes: dict[str, Any]
    refused: bool


@functools.cache
def calls() -> dict[str, Call]:
    """The functions of `cope_jax`, by name."""
    q = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)
    sizes = {"num_heads": 2, "head_dim": 8}
    encoding = cj.encodings.create("cope", **sizes, rngs=nnx.Rngs(0))
    task = cj.tasks.create("flip_flop", length=8)
    model = models.model(models.config(vocab_size=task.vocab_size))
    rng = np.random.default_rng(0)
    numbers = {
        **dict.fromkeys(sizes, "int"),
        **dict.fromkeys(("num_kv_heads", "model_dim", "max_length"), "int?"),
    }
    words = {"vocabulary": task.vocabulary, "tokens_L": [1, 0]}
    return {
        "attend": Call(
            lambda q, k, v, **options: cj.attend(q, k, v, **options),
            {"q": q, "k": q, "v": q, "encoding": encoding},
            {
                **dict.fromkeys("qkv", "array"),
                **dict.fromkeys(
                    ("q_positions", "k_positions", "q_segment_ids", "k_segment_ids"), "ids?"
                ),
                **dict.fromkeys(("embedded", "causal"), "bool"),
                **dict.fromkeys(("sequence_axis", "head_axis"), "str?"),
                **{
                    "encoding": "object",
                    "mask": "mask?",
                    "window": "int?",
                    "implementation": "str",
                },
                **{
                    "dropout_rate": "float",
                    "dropout_key": "key?",
                    "batch_axes": "names",
                    "blocks": "sizes?",
                },
            },
        ),
        "encodings.create": Call(
            cj.encodings.create,
            {"name": "rope", **sizes, "rngs": nnx.Rngs(0)},
            {"name": "str", **numbers, "rngs": "object"},
        ),
        "models.create": Call(
            cj.models.create,
            {"name": "decoder", "config": model.config, "rngs": nnx.Rngs(0)},
            {"name": "str", "config": "object", "rngs": "object"},
        ),
        "tasks.create": Call(
            cj.tasks.create, {"name": "flip_flop"}, {"name": "str", "length": "int"}
        ),
        "tasks.names": Call(cj.tasks.names, {}, {"ability": "str?"}),
        "sample": Call(
            task.sample, {"rng": rng, "n": 2}, {"rng": "object", "n": "int", "split": "str"}
        ),
        "dataset": Call(
            task.dataset, {"split": "train", "n": 2}, {"split": "str", "n": "int", "seed": "int"}
        ),
        "config": Call(
            cj.config, {"name": "quick"}, {"name": "path", "training": "config", "encoding": "str"}
        ),
        "Experiment": Call(cj.Experiment, {"config": None}, {"config": "object"}),
        "ExperimentConfig": Call(
            cj.ExperimentConfig,
            {},
            {"task": "config", "encoding": "str", "seeds_side_by_side": "int"},
        ),
        "load": Call(cj.load, {"folder": "counting"}, {"folder": "path"}),
        "generate": Call(
            cj.generate,
            {"model": model, "prompts": [[1, 2]], "max_new_tokens": 2, "key": KEY},
            {
                **{
                    "model": "object",
                    "prompts": "prompts",
                    "max_new_tokens": "int",
                    "key": "key",
                    "temperature": "float",
                },
                **{"top_k": "int?", "top_p": "float?", "stop_token": "stops?", "padded": "int"},
            },
        ),
        "inspect": Call(
            cj.inspect,
            {"model": model, **words},
            {
                "model": "object",
                "vocabulary": "object",
                "tokens_L": "tokens",
                "query": "int",
                "layer": "int?",
                "head": "int?",
            },
        ),
    }


def each() -> Iterator[Case]:
    """Every argument of every call with every value that is wrong for its kind."""
    for name, call in calls().items():
        for argument, kind in call.kinds.items():
            for value in WRONG[kind.removesuffix("?")]:
                if not (value is None and kind.endswith("?")):
                    yield Case(name, {argument: value}, True)


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Random cases with one to three changed arguments."""
    rng = random.Random(seed)
    everything = (*(value for values in WRONG.values() for value in values), *OTHERS)
    for _ in range(count):
        name = rng.choice(list(calls()))
        kinds = calls()[name].kinds
        chosen = rng.sample(list(kinds), min(len(kinds), rng.choice((1, 1, 2, 3))))
        yield Case(name, {argument: rng.choice(everything) for argument in chosen}, False)


def problem(case: Case) -> str | None:
    """The mistake in the answer to a case; None for a result, or an error of one line."""
    call = calls()[case.name]
    try:
        call.function(**{**call.arguments, **case.changes})
    except (ConfigError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (
            isinstance(error, TypeError)
            and Path(cj.__file__).parent not in Path(last.filename).parents
        ):
            return f"{type(error).__name__} from {last.filename}:{last.lineno}: {error}"
        return None if str(error) and "\n" not in str(error) else f"not one line: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted" if case.refused else None
