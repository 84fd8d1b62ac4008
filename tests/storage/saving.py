"""Checkpoints of a tiny state, in a bucket."""

import itertools

import jax
import jax.numpy as jnp

from cope_jax.storage.checkpoints import Checkpoints

URL = "gs://bucket/runs/cope"


def state(number):
    return {
        "params": {"kernel": jnp.full((4, 3), number, jnp.float32)},
        "key": jax.random.key(number),
    }


def save(folder, steps, scores=(), **options):
    with Checkpoints(folder / "checkpoints", **options) as checkpoints:
        for step, score in itertools.zip_longest(steps, scores):
            checkpoints.save(step, state(step), {"data": [step], "seconds": 1.0}, score)


def complete(server):
    return [int(name.split("/")[3]) for name in server.names() if name.endswith("/.complete")]
