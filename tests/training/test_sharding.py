"""A mesh of eight devices trains as one device does, however its axes are used."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.config import BlockConfig
from cope_jax.layout import WHOLE
from cope_jax.models.decoder import DecoderConfig
from cope_jax.training import sharding
from cope_jax.training.config import MeshConfig, OptimizerConfig
from cope_jax.training.learner import Learner
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.program import Program
from cope_jax.training.replicas import Replicas

# 8 symbols: a vocabulary that two devices share; sequences of 7 tokens, which no axis divides.
TASK = tasks.create("selective_copy", num_symbols=6, num_tokens=2, num_blanks=4)
BATCH = 8
MODEL = DecoderConfig(
    vocab_size=TASK.vocab_size,
    max_length=TASK.max_length,
    encoding=EncodingConfig.parse("learned+cope(npos_max=4,gate=separate_key)+t5"),
    block=BlockConfig(model_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32, activation="swiglu"),
)
MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 4},
    "sequence": {"sequence": 8},
    "data and fsdp": {"data": 2, "fsdp": 4},
    "fsdp and tensor": {"fsdp": 4, "tensor": 2},
    "data and sequence": {"data": 2, "sequence": 4},
    "tensor and sequence": {"tensor": 2, "sequence": 4},
    "all but data": {"fsdp": 2, "tensor": 2, "sequence": 2},
}
ONE = MeshConfig(data=1)


def learner(layout=WHOLE, accumulate=1, **changes):
    config = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0)
    model = dataclasses.replace(MODEL, layout=layout, **changes)
    return Learner(model, create_optimizer(config, 9), create_schedule(config, 9), accumulate=accumulate)


@functools.cache
def program(mesh, width=1, accumulate=1, remat="none"):
    devices = sharding.create_mesh(mesh)
    layout = sharding.layout_of(devices)
    return Program(learner(layout, accumulate, remat=remat), Replicas(width), devices)


def batches(count=2):
    drawn = [TASK.sample(np.random.default_rng([5, number]), BATCH) for number in range(count)]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *drawn)


def train(program, seeds=(3,), count=2):
    stacked = program.replicas.stack([batches(count)] * len(seeds))
    return program.train_steps(program.init(seeds), program.place(stacked, BATCH))


@functools.cache
def gradient(program):
    """Loss and gradient of the first batch at random parameters, where no table is at its start."""
    params = program.init([3]).params
    noise = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    params = jax.tree.map(
        lambda p, key: jax.device_put(p + 0.3 * np.asarray(jax.random.normal(key, p.shape)), p.sharding),
        params,
        jax.tree.unflatten(jax.tree.structure(params), list(noise)),
    )
    batch = program.place(batches(1), BATCH)
    with jax.set_mesh(program.mesh):
        run = jax.jit(lambda params, batch: program.learner.gradient(params, jax.tree.map(lambda x: x[0], batch), KEY))
        loss, grads = run(params, batch)
    return float(loss), {
        jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(grads)
    }


KEY = jax.random.key(9)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_loss_and_gradients_equal_those_of_one_device(axes):
    exact_loss, exact = gradient(program(ONE))
    loss, found = gradient(program(MeshConfig(**{"data": 1, **axes})))
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    largest = max(np.abs(expected).max() for expected in exact.values())
    for name, expected in exact.items():
        # Some are 0 but for rounding, as those of a key's bias, which softmax does not see.
        scale = max(np.abs(expected).max(), 1e-2 * largest)
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_two_steps_equal_those_of_one_device(axes):
    _, exact = train(program(ONE))
    _, found = train(program(MeshConfig(**{"data": 1, **axes})))
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], rtol=1e-4, err_msg=name)
