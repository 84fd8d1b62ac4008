"""Builds the decoder of an ability's config with weights written by hand, and measures it."""

from typing import Any

import jax
import numpy as np

import cope_jax as cj
from cope_jax.training.evaluator import Evaluator
from cope_jax.training.from_config import create_program
from experiments.by_hand.gadgets import (
    ALiBi,
    CoPE,
    CoPESigned,
    FoX,
    Gadgets,
    NoPE,
    PaTH,
    StickBreaking,
)
from experiments.by_hand.recipes import RECIPES
from experiments.by_hand.turns import MapFormer, PoPE, RoPE
from experiments.by_hand.weights import Weights

GADGETS: dict[str, type[Gadgets]] = {
    "cope": CoPE,
    "rope": RoPE,
    "fox": FoX,
    "path": PaTH,
    "stick_breaking": StickBreaking,
    "none": NoPE,
    "pope": PoPE,
    "mapformer": MapFormer,
    "cope_signed": CoPESigned,
    "alibi": ALiBi,
}

LONGER: dict[str, Any] = {
    "ignore": lambda times: {"length": 64 * times},
    "count": lambda times: {"max_operations": 48 * times, "block_length": 96 * times},
    "recall": lambda times: {"space": 8 * times},
    "occurrence": lambda times: {"assignments": 32 * times},
    "steps": lambda times: {"steps": 32 * times, "side": 32 * times},
    "state": lambda times: {"length": 8 * times},
    "parity": lambda times: {"length": 16 * times},
    "index": lambda times: {"longest": min(4 * times, 51)},
    "stack": lambda times: {"length": 24 * times, "depth": 3 * times},
    "copy": lambda times: {"letters": 16 * times},
    "arithmetic": lambda times: {"digits": 2 * times},
}
"""The options of an ability's task whose sequences are `times` as long as those of training."""
MOST_TIMES = {"index": 13}
"""By ability, the multiple beyond which sequences get no longer: `index` has at most 51 letters."""

SPLIT = "in_distribution"


def config(encoding: str, ability: str, times: int, **changes: Any) -> Any:
    """The config of an ability with longer sequences, and the sizes that the recipe needs.

    Without `held_out`: no data was trained on, and the draw takes ten times as long.
    """
    base = cj.config(f"abilities:{ability}_v2")
    options = {**base.task.options, "held_out": 0.0, **LONGER[ability](times)}
    sizes = dict(RECIPES[ability].sizes(GADGETS[encoding]))
    block = {**sizes.pop("block", {}), **changes}
    return cj.config(
        f"abilities:{ability}_v2",
        encoding=encoding,
        task={"options": options},
        model={**sizes, "block": block},
    )


def parameters(encoding: str, ability: str, program: Any, task: Any) -> Any:
    """The parameters of the decoder of an ability, written by its recipe."""
    recipe, learner = RECIPES[ability], program.learner
    shapes = jax.eval_shape(learner.init, np.int32(0)).params
    weights = Weights(learner.model, shapes, recipe.registers)
    tokens = {text: number for number, text in enumerate(task.vocabulary)}
    recipe.write(weights, GADGETS[encoding](weights), tokens)
    return weights.finish()


def error(
    encoding: str, ability: str, times: int, examples: int, rows: int = 250, **block: Any
) -> float:
    """The mean error of the hand-written weights in sequences `times` as long as in training."""
    settings = config(encoding, ability, times, **block)
    task = settings.task.create()
    program = create_program(settings, task)
    params = jax.device_put(
        parameters(encoding, ability, program, task), program.state_shardings.params
    )
    tokens = 2**15 if encoding == "path" else 2**17
    errors = []
    for seed in range(-(-examples // rows)):
        count = min(rows, examples - seed * rows)
        evaluator = Evaluator(
            program,
            task,
            {SPLIT: count},
            batch_size=max(1, min(count, tokens // task.length(SPLIT))),
            data_seed=seed,
        )
        errors.append((count, evaluator(params)[SPLIT][0][task.metric]))
    return sum(count * value for count, value in errors) / examples
