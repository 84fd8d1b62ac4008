"""A model so small that its compiled programs, made once for the whole folder, cost seconds."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax import tasks
from cope_jax.data import pipeline
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.decoder import DecoderConfig
from cope_jax.training.experiment_config import MeshConfig, OptimizerConfig, TrainingConfig
from cope_jax.training.learner import Learner
from cope_jax.training.loop import Run
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.program import Program, SeedBatch
from cope_jax.training.sharding import create_mesh, layout_of
from cope_jax.training.throughput import Throughput

TASK = tasks.create("flip_flop", length=8)
BATCH, LENGTH = 4, TASK.max_length
STEPS, DISPATCH = 12, 2
MODEL = DecoderConfig(
    vocab_size=TASK.vocab_size,
    max_length=LENGTH + 3,
    encoding=EncodingConfig.parse("learned+cope(npos_max=4)"),
    block=BlockConfig(model_dim=8, num_heads=2, dropout=0.1),
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=2)


ONE = MeshConfig(data=1)


def create_learner(sampler: str = "consecutive", layout: Layout = WHOLE, **changes: Any) -> Learner:
    """The learner; `changes` replace fields of it."""
    model = dataclasses.replace(MODEL, layout=layout)
    optimizer, schedule = create_optimizer(OPTIMIZER, STEPS), create_schedule(OPTIMIZER, STEPS)
    return dataclasses.replace(
        Learner(model, optimizer, schedule, model.max_length, sampler, BATCH), **changes
    )


@functools.cache
def program(width: int = 1, mesh: MeshConfig = ONE) -> Program:
    devices = create_mesh(mesh)
    return Program(create_learner(layout=layout_of(devices)), SeedBatch(width), devices)


def measuring(
    metrics: Callable[..., Any],
    *,
    initial_carry: Callable[[int], Any] = lambda rows: (),
    sampler: Callable[..., Any] = lambda key, batch, length: np.arange(length, dtype=np.int32)[
        None
    ],
    put: Callable[[Any], Any] = lambda batch: batch,
    width: int = 1,
    sequence: int = 1,
) -> Any:
    """A program for an evaluator, which measures by a function of (params, carry, batch)."""
    fields = {
        "metrics": metrics,
        "initial_carry": initial_carry,
        "sample_positions": sampler,
        "losses": ("loss",),
    }
    stub: Any = SimpleNamespace(**fields)
    stub.with_positions = functools.partial(Learner.with_positions, stub)
    mesh = create_mesh(MeshConfig(data=1, sequence=sequence))
    return SimpleNamespace(
        learner=stub, seed_batch=SeedBatch(width), mesh=mesh, place_whole=put, whole=None
    )


@functools.cache
def single_step() -> Callable[..., Any]:
    return jax.jit(create_learner().train_step)


def batch(number: int = 0, rows: int = BATCH) -> dict[str, np.ndarray]:
    return TASK.sample(np.random.default_rng([7, number]), rows)


def batches(count: int) -> dict[str, np.ndarray]:
    """`count` batches stacked along a leading axis."""
    return jax.tree.map(
        lambda *arrays: np.stack(arrays), *(batch(number) for number in range(count))
    )


def iterators(seeds: list[int], examples: int | None) -> list[Any]:
    options = {"batch_size": BATCH, "examples": examples, "data_seed": 0}
    return [pipeline.train_iterator(TASK, shuffle_seed=seed, **options) for seed in seeds]


def create_run(workdir: Path, seeds: list[int], examples: int | None = None, **changes: Any) -> Run:
    """A run of `STEPS` steps; `changes` replace fields of it."""
    config = TrainingConfig(
        steps=STEPS,
        batch_size=BATCH,
        steps_per_dispatch=DISPATCH,
        evaluate_every=4,
        checkpoint_every=4,
    )

    def evaluate(state: Any, step: int) -> list[dict[str, Any]]:
        sums = np.atleast_1d(
            jax.device_get(state.params["embedding"]["embedding"].sum(axis=(-2, -1)))
        )
        return [
            {"step": step, "seed": s, "split": "dense", "loss": float(v)}
            for s, v in zip(seeds, sums, strict=True)
        ]

    throughput = Throughput(BATCH * LENGTH, 1.0, jax.devices()[:1])
    fields = {
        "program": program(len(seeds)),
        "config": config,
        "evaluate": evaluate,
        "throughput": throughput,
    } | changes
    return Run(seeds=seeds, workdir=workdir, iterators=iterators(seeds, examples), **fields)


def contents(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Type, shape and bytes of leaves by path: equal exactly if the trees are bit-identical."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        leaves[jax.tree_util.keystr(path)] = (
            str(leaf.dtype),
            leaf.shape,
            np.asarray(leaf).tobytes(),
        )
    return leaves
