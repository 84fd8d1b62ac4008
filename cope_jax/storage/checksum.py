"""Computes fingerprints that tell if arrays are bit-identical, on any devices."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree


def of_arrays(tree: PyTree) -> dict[str, int]:
    """Computes a fingerprint of each array, by the name of the array.

    The fingerprint is Σ h(b ⊕ h(p)) mod 2³², where b is the bits of an element, p is the index of
    the element in the array, and h is a hash without collisions. The order of the sum does not
    matter, so the fingerprint is the same for any sharding. Changing one element of at most 32 bits
    always changes the fingerprint. Each device reads its own part of an array once.

    >>> of_arrays({"kernel": jnp.zeros(3), "key": jax.random.key(0)}) == of_arrays({"kernel": jnp.zeros(3), "key":
    ... jax.random.key(0)})
    True
    >>> of_arrays([jnp.array([1.0, 2.0])]) == of_arrays([jnp.array([2.0, 1.0])])
    False
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_fingerprints([leaf for _, leaf in leaves]))
    return {name(path): int(total) for (path, _), total in zip(leaves, sums, strict=True)}


def of_data(data: Any) -> int:
    """Computes a fingerprint of plain data that JSON can represent.

    >>> of_data({"indices": [1, 2], "seconds": 0.5}) == of_data({"seconds": 0.5, "indices": [1, 2]})
    True
    """
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


def name(path: Any) -> str:
    """The name of an array in a pytree: the keys of its path, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


@jax.jit
def _fingerprints(leaves: list[Array]) -> list[Array]:
    # One program, because on a CPU several programs with sums over all devices can deadlock.
    return [_fingerprint(leaf) for leaf in leaves]


def _fingerprint(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    width = min(leaf.dtype.itemsize, 4)  # eight bytes become two numbers along a new last axis
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position * jnp.uint32(size) + index
    return jnp.sum(_hash(bits ^ _hash(position)), dtype=jnp.uint32)


def _hash(x: Array) -> Array:
    """The finaliser of MurmurHash3, a permutation of 32-bit numbers (Appleby, 2011)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
