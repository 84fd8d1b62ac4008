"""Random attention problems, and every implementation's value and gradients of them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from cope_jax.attention import (
    BlockSizes,
    Plan,
    blockwise_attention,
    full_attention,
    placement,
    prepare,
)
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.layout import Layout
from tests.encodings.cases import BATCH, SIZES, build, parameters, parts, problem, rule_of
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.encodings import Sizes


class Data(NamedTuple):
    """The data that may change without a new compilation: positions and segments `[B, L]`, indices
    `[L]`, the mask `[B, 1, L, M]`, the key of dropout.

    None for indices: those of `prepare`, known while tracing.
    """

    q_positions: Any
    k_positions: Any
    q_segments: Any
    k_segments: Any
    q_indices: Any
    k_indices: Any
    mask: Any = None
    dropout_key: Any = None


def arrays_of(
    length: int,
    keys: int,
    seed: int = 0,
    batch: int = BATCH,
    sizes: Sizes = SIZES,
    dtype: Any = np.float64,
):
    """x, k and v of the keys; q and the output's cotangent of the queries."""
    queries, others = (
        problem(s, batch, n, sizes, dtype) for s, n in ((seed, length), (seed + 1000, keys))
    )
    return {
        "x": others["x"],
        "k": others["k"],
        "v": others["v"],
        "q": queries["q"],
        "dout": queries["dout"],
    }


def plain(length: int, keys: int, batch: int = BATCH) -> Data:
    """Consecutive positions, the last query at the last key, one segment."""
    q_indices, k_indices = (
        np.arange(keys - length, keys, dtype=np.int32),
        np.arange(keys, dtype=np.int32),
    )
    positions = np.broadcast_to(k_indices, (batch, keys))
    return Data(
        positions[:, np.maximum(q_indices, 0)],
        positions,
        np.zeros((batch, length), np.int32),
        np.zeros((batch, keys), np.int32),
        q_indices,
        k_indices,
    )


def is_causal_only(spec: str) -> bool:
    """Returns whether a visible key at a later position than the query's has no row."""
    return "relative" in {name for name, _ in parts(spec)}


def inputs_of(encoding: Any, arrays: Any, data: Data, **static: Any) -> Any:
    """The request, with the indices of the data."""
    request = prepare(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        encoding=encoding,
        x=encoding.embed(arrays["x"], data.k_positions),
        embedded=True,
        q_positions=data.q_positions,
        k_positions=data.k_positions,
        q_segment_ids=data.q_segments,
        k_segment_ids=data.k_segments,
        mask=data.mask,
        dropout_key=data.dropout_key,
        **static,
    )
    if data.q_indices is None:
        return request
    queries = dataclasses.replace(request.queries, indices=data.q_indices)
    return dataclasses.replace(
        request, queries=queries, keys=dataclasses.replace(request.keys, indices=data.k_indices)
    )


def ran(plan: Any) -> Any:
    """The result of a plan."""
    assert isinstance(plan, Plan), plan
    return plan.run()


def in_blocks(blocks: Any, attention: Any = blockwise_attention) -> Any:
    """An implementation, with these sizes of blocks."""
    sizes = None if blocks is None else BlockSizes(*blocks)
    return lambda encoding, request: attention(encoding, dataclasses.replace(request, blocks=sizes))


def interpreted(blocks: Any, resident: int | None = None) -> Any:
    """The kernels for TPUs, interpreted."""
    return in_blocks(
        blocks, lambda *call: ran(tpu_attention.plan(*call, resident=resident, interpret=True))
    )


def value_and_gradients(
    attention: Any, graphdef: Any, state: Any, arrays: Any, data: Data, **static: Any
) -> Any:
    """The output, and the gradients by the parameters, x, q, k and v."""

    def out(state, inputs):
        encoding = nnx.merge(graphdef, state)
        request = inputs_of(encoding, inputs, data, **static)
        queries, attended = request.queries, attention(encoding, request)
        return encoding.rotate_back(attended, queries.features, queries.positions)

    value, pull = jax.vjp(out, state, {name: arrays[name] for name in "xqkv"})
    return value, pull(arrays["dout"])


def full_and_blockwise(
    graphdef: Any, state: Any, arrays: Any, data: Data, *, blocks: BlockSizes, **static: Any
) -> Any:
    """Both implementations' `value_and_gradients`."""
    return with_full(in_blocks(blocks), graphdef, state, arrays, data, **static)


def with_full(
    attention: Any, graphdef: Any, state: Any, arrays: Any, data: Data, **static: Any
) -> Any:
    """`value_and_gradients` of full attention and of another implementation."""
    both = full_attention, attention
    return tuple(
        value_and_gradients(each, graphdef, state, arrays, data, **static) for each in both
    )


def named(result: Any) -> dict[str, np.ndarray]:
    """One flat dict of NumPy arrays: "out", and each gradient by the name of what it is a gradient
    of.
    """
    out, (dstate, dinputs) = result
    return (
        {"out": np.asarray(out)}
        | {n: np.asarray(d) for n, d in dinputs.items()}
        | parameters(dstate)
    )


def assert_equal(computed: Any, exact: Any, atol: float = 1e-12) -> None:
    """Value and every gradient, to the last digits of the largest."""
    computed, exact = named(computed), named(exact)
    assert computed.keys() == exact.keys()
    for name, array in exact.items():
        assert np.isfinite(array).all(), f"{name}: the reference is not finite"
        scale = max(1.0, np.abs(array).max(initial=0))
        np.testing.assert_allclose(computed[name], array, rtol=0, atol=atol * scale, err_msg=name)


def oracle(
    spec: str, state: Any, arrays: Any, data: Data, example: int, sizes: Sizes = SIZES, **mask: Any
) -> Any:
    """The output of one example by loops; the indices are those of `plain`."""
    rule = rule_of(spec, parameters(state), sizes)
    q, k, v, x = (np.asarray(arrays[name][example]) for name in "qkvx")
    positions = data.k_positions[example]
    return oracle_attention(
        q,
        k,
        v,
        rule,
        x_MD=np.stack(
            [rule.embed(row, int(position)) for row, position in zip(x, positions, strict=True)]
        ),
        q_positions=data.q_positions[example],
        k_positions=positions,
        q_segments=data.q_segments[example],
        k_segments=data.k_segments[example],
        mask=None if data.mask is None else data.mask[example, 0],
        **mask,
    )


def encoding_of(spec: str, sizes: Sizes = SIZES, dtype: Any = np.float64) -> Any:
    """The encoding of a case, with random parameters."""
    return nnx.merge(*build(spec, sizes=sizes, dtype=dtype))


DOCUMENTS = "documents"
SHUFFLED = "shuffled"


@functools.cache
def segment_ids(kind: str, keys: int) -> np.ndarray:
    """Segment ids of the keys: those of documents ascend, the others do not."""
    if kind == DOCUMENTS:
        return np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, keys)), axis=1).astype(
            np.int32
        )
    return np.random.default_rng(1).integers(0, 3, (BATCH, keys)).astype(np.int32)


@functools.cache
def _compiled(attention: Any, spec: str, sizes: Sizes, x64: bool, **static: Any) -> Any:
    del x64  # part of the key: constants of encodings depend on it
    graphdef, _ = build(spec, sizes=sizes)
    return jax.jit(
        lambda state, arrays, data: value_and_gradients(
            attention, graphdef, state, arrays, data, **static
        )
    )


def assert_equals_full(
    attention: Any,
    spec: str,
    length: int,
    keys: int,
    *,
    sizes: Sizes,
    segments: str | None = None,
    no_keys: bool = False,
    step: float = 1,
    atol: float = 3e-5,
    least: float = 1e-3,
    dtype: Any = np.float32,
    **static: Any,
) -> None:
    """An implementation against full attention in float64, relative to the largest entry of each
    array, or to `least`.

    The arrays have type `dtype`; the parameters are float64 if this is float64, else float32. With
    `no_keys` all keys are 0, so every gate is exactly ½, and every second position is whole.
    Positions are multiples of `step`.
    """
    # Kernels know them while tracing.
    data = plain(length, keys)._replace(q_indices=None, k_indices=None)
    q, k = data.q_positions * step, data.k_positions * step
    data = data._replace(q_positions=q, k_positions=k)
    if segments is not None:
        ids = segment_ids(segments, keys)
        data = data._replace(k_segments=ids, q_segments=ids[:, keys - length :])
    if static.get("dropout_rate"):
        data = data._replace(dropout_key=jax.random.key(0))
    _, state = build(spec, sizes=sizes)
    arrays, x64 = arrays_of(length, keys, sizes=sizes), dtype == np.float64
    real = np.float64 if x64 else np.float32
    state, arrays = jax.tree.map(lambda x: np.asarray(x, real), (state, arrays))
    if no_keys:
        arrays["k"] = 0 * arrays["k"]
    arrays = jax.tree.map(lambda x: x.astype(dtype), arrays)
    with jax.enable_x64(x64):
        computed = named(_compiled(attention, spec, sizes, x64, **static)(state, arrays, data))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (state, arrays))
        exact = named(_compiled(full_attention, spec, sizes, True, **static)(*wide, data))
    assert computed.keys() == exact.keys()
    for name, array in exact.items():
        scale = max(np.abs(array).max(), least)
        np.testing.assert_allclose(
            computed[name], array, rtol=0, atol=atol * scale, err_msg=f"{spec} {name}"
        )


def check_types_vmap_and_devices(attention, why_not, encoding, atol=0.0):
    """bfloat16 results have its type, and are off by at most `atol`; vmap calls the kernel for each
    entry, and each device for its own examples. Returns attention as a function of q, k and v, and such arrays.
    """
    q, k, v = (
        jax.random.normal(jax.random.key(n), (4, 70, heads, 16))
        for n, heads in ((0, 4), (1, 2), (2, 2))
    )

    @jax.jit
    def out(q, k, v):
        return attention(encoding, prepare(q, k, v, encoding=encoding))

    whole = out(q, k, v)
    one_by_one = jax.vmap(out)(*(x[:, None] for x in (q, k, v)))
    np.testing.assert_array_equal(one_by_one[:, 0], whole)
    rounded = [jnp.bfloat16(x) for x in (q, k, v)]
    assert out(*rounded).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        jnp.float32(out(*rounded)),
        jnp.float32(jnp.bfloat16(out(*(jnp.float32(x) for x in rounded)))),
        rtol=0,
        atol=atol,
    )
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        request = prepare(q, k, v, encoding=encoding)
        assert "splits neither the batch nor" in why_not(encoding, request)
        request = dataclasses.replace(request, layout=Layout(batch=("data",)))
        split = placement.shard_batch(attention, encoding, request)
    np.testing.assert_array_equal(split, whole)
    return out, (q, k, v)
