"""Whole training steps of the recipes in experiments/configs: ours, and x-transformers' of the same sizes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from cope_jax import tasks
from cope_jax.training import from_config
from cope_jax.training.experiment_config import JobConfig, MeshConfig
from experiments.benchmark.contenders import of_torch
from experiments.benchmark.timing import Build, Case, Task, WithNote
from experiments.benchmark.workloads import STEP, Recipe

X_TRANSFORMERS = ("cope", "rope")


def cases(recipes: Sequence[Recipe], names: Sequence[str], devices: int) -> list[Case]:
    """One case for each recipe: each encoding in our decoder, and CoPE and RoPE in x-transformers'."""
    built = []
    for recipe in recipes:
        builds: dict[str, Build] = {name: functools.partial(ours, recipe, name, devices) for name in names}
        for name in X_TRANSFORMERS:
            builds[f"{name}, x-transformers"] = functools.partial(of_torch, "x_transformers_step", recipe, name)
        fields = {"section": "train", "recipe": recipe.label, "devices": devices}
        built.append(Case(fields, builds, names[0], cost=recipe.batch()["inputs"].size * 500))
    return built


def ours(recipe: Recipe, encoding: str, devices: int = 1) -> Mapping[str, Task]:
    """One step of training as the loop runs it, its batch split over devices; on one where that cannot be."""
    size = recipe.config.training.batch_size
    shares = 1 if size % devices else devices
    config = dataclasses.replace(recipe.config, encoding=encoding, job=JobConfig(mesh=MeshConfig(data=shares)))
    task = tasks.create(config.task.name, **config.task.options)
    program = from_config.create_program(config, task, devices=jax.devices()[:shares])
    state = program.init([0])
    batches = program.place(jax.tree.map(lambda array: array[None], dict(recipe.batch())), size)

    def step() -> float:
        nonlocal state
        state, metrics = program.train_steps(state, batches)
        return float(np.asarray(jax.block_until_ready(metrics["loss"])).item())

    if shares < devices:
        return WithNote({STEP: step}, f"on 1 device, for {devices} cannot share a batch of {size} evenly")
    return {STEP: step}
