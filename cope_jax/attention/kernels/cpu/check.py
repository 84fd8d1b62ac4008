"""Compares kernels of a compiled library with full attention on a small problem.

Run as `python -m cope_jax.attention.kernels.cpu.check PATH`. The exit status is 0 if value and
gradients agree, and `library.WRONG` if they differ.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax import encodings
from cope_jax.array_types import Array
from cope_jax.attention.full import full_attention
from cope_jax.attention.kernels.cpu import cpp_attention, library
from cope_jax.attention.request import Request, prepare
from cope_jax.encodings import Encoding

LENGTH, TOLERANCE = 300, 1e-3  # several blocks


def agrees(spec: str) -> bool:
    """Returns whether the kernels equal full attention in value and all gradients of queries, keys
    and values.
    """
    encoding = encodings.create(spec, num_heads=2, num_kv_heads=1, head_dim=32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(1, LENGTH, n, 32)), jnp.float32) for n in (2, 1, 1, 2)
    )

    def results(attention: Callable[[Encoding, Request], Array], *given: Array) -> Any:
        def run(q: Array, k: Array, v: Array) -> Array:
            return attention(encoding, prepare(q, k, v, encoding=encoding))

        out, pull = jax.vjp(run, *given)
        return out, *pull(dout)

    # One program each: operation by operation they would take twice the time.
    ours, exact = (
        jax.jit(functools.partial(results, attention))(q, k, v)
        for attention in (cpp_attention.run, full_attention)
    )
    return all(np.allclose(x, y, rtol=0, atol=TOLERANCE) for x, y in zip(ours, exact, strict=True))


if __name__ == "__main__":
    library.register(Path(sys.argv[1]))
    sys.exit(0 if agrees("cope(npos_max=70)") else library.WRONG)
