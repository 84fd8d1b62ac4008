"""Attention of one new token to a cache of the keys and values of the tokens before it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.attention import Cache, attend_cached, create_cache
from experiments.benchmark.timing import Case, Task
from experiments.benchmark.workloads import Problem

TOKEN = "attention of one token"


def cases(problem: Problem, names: Sequence[str]) -> list[Case]:
    """One case: each encoding, with a context of the problem's length."""
    fields = {"section": "decode", "context": problem.length, **problem.fields()}
    builds = {name: functools.partial(step, name, problem) for name in names}
    return [Case(fields, builds, names[0], cost=problem.length * 100)]


def step(spec: str, problem: Problem) -> Mapping[str, Task]:
    """Enters a token as the last of L and attends to all of them; the cache is updated in place.

    The task returns out_B1HK. Every call enters the same token anew, so the context does not grow.
    """
    merge, params = problem.encoding(spec)
    q, k, v, _ = (jnp.asarray(array, problem.dtype) for array in problem.arrays())

    def enter(params: Any, cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
        positions_BL = cache.filled + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
        return cache.enter(positions_BL).append(q, k, v, encoding=merge(params))

    @functools.partial(jax.jit, donate_argnums=1)
    def attend(params: Any, cache: Cache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Cache]:
        cache = enter(params, cache, q, k, v)
        out = attend_cached(q, cache, encoding=merge(params), embedded=True)
        return out, dataclasses.replace(cache, filled=cache.filled - 1)

    empty = create_cache(merge(params), batch=problem.batch, capacity=problem.length, dtype=problem.dtype)
    cache = jax.jit(enter)(params, empty, q[:, :-1], k[:, :-1], v[:, :-1])
    token = q[:, -1:], k[:, -1:], v[:, -1:]

    def task() -> jax.Array:
        nonlocal cache
        out, cache = attend(params, cache, *token)
        return jax.block_until_ready(out)

    return {TOKEN: task}
