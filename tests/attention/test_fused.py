"""The fused kernels, interpreted, say what full attention says, in value and every gradient, for
every encoding.
"""

import dataclasses
import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from cope_jax import encodings
from cope_jax.attention import BlockSizes, Reason, attend, placement, prepare
from cope_jax.attention.kernels.tpu import tpu_attention, tpu_ops
from cope_jax.errors import ConfigError
from cope_jax.layout import Layout
from tests.attention.problems import (
    arrays_of,
    assert_equal,
    interpreted,
    plain,
    value_and_gradients,
    with_full,
)
from tests.attention.test_blockwise import random_data
from tests.encodings.cases import SIZES, build, every, parts, splits_queries
from tests.oracle.encodings import Sizes

LENGTH, KEYS = 7, 11
# A block of queries is 3, one of keys 2, or 4 where all rows are saturated; 4 or 6 keys are in fast
# memory at a time.
BLOCKS = BlockSizes(3, 2, 4)
REFUSED = {
    "cope_two_sided": "all keys in one block",
    "path": "all keys in one block",
    "wall": "all keys in one block",
    "selective": "all keys in one block",
    "dape": "(mixes all heads|all keys in one block)",
    "mlp": "more than two axes",
}


def reason(spec):
    """Returns a pattern of the reason that no kernel takes it, or None."""
    names = {*dict(parts(spec)), *re.findall("mlp", spec)}
    return next((why for name, why in REFUSED.items() if name in names), None)


FEW = ["stick_breaking(see_itself=True,remainder=own)", "cope(npos_max=4)+relative(max_distance=5)"]


@functools.cache
def compiled(spec, causal=True, window=None, rate=0.0, resident=4, sizes=SIZES):
    graphdef, _ = build(spec, sizes=sizes)
    kernels = interpreted(BLOCKS, resident)
    static = {"causal": causal, "window": window, "dropout_rate": rate}
    return jax.jit(
        lambda state, arrays, data: with_full(kernels, graphdef, state, arrays, data, **static)
    )


@every(few=FEW)
def test_every_encoding(spec, x64):
    run, (_, state) = compiled(spec), build(spec)
    if not splits_queries(spec):
        with pytest.raises(ConfigError, match="couples the queries"):
            run(state, arrays_of(LENGTH, KEYS), plain(LENGTH, KEYS))
        return
    if reason(spec) is not None:
        with pytest.raises(AssertionError, match=reason(spec)):  # it has no plan
            run(state, arrays_of(LENGTH, KEYS), plain(LENGTH, KEYS))
        return
    full, kernels = run(state, arrays_of(LENGTH, KEYS), plain(LENGTH, KEYS))
    assert_equal(kernels, full)
    for seed in range(5):
        full, kernels = run(state, arrays_of(LENGTH, KEYS, seed), random_data(seed, LENGTH, KEYS))
        assert_equal(kernels, full)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5, "rate": 0.4},
        pytest.param({"causal": False, "rate": 0.4}, marks=pytest.mark.slow),
        pytest.param({"causal": False, "window": 3, "resident": 11}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_windows_both_sides_and_dropout(options, x64):
    spec = "cope(npos_max=3,gate=separate_key)" if options.get("causal", True) else "kerple"
    run, (_, state) = compiled(spec, **options), build(spec)
    for seed in range(3):
        data = random_data(seed, LENGTH, KEYS)
        if "rate" in options:
            data = data._replace(dropout_key=jax.random.key(seed))
        full, kernels = run(state, arrays_of(LENGTH, KEYS, seed), data)
        assert_equal(kernels, full)


@pytest.mark.slow
def test_tables_of_several_registers(x64):
    """The table is longer than a register has columns.

    Saturated rows see wide blocks, then narrow and hidden ones.
    """
    sizes, spec = (
        Sizes(heads=1, kv_heads=1, head_dim=4, model_dim=4, max_length=200),
        "cope(npos_max=140)",
    )
    graphdef, state = build(spec, sizes=sizes)
    kernels = interpreted((40, 50, 100))
    arrays, data = arrays_of(40, 700, batch=1, sizes=sizes), plain(40, 700, 1)
    segments = (data.k_positions >= 75).astype(np.int32)
    data = data._replace(k_segments=segments, q_segments=segments[:, -40:])
    full, computed = jax.jit(
        lambda state, arrays: with_full(kernels, graphdef, state, arrays, data)
    )(state, arrays)
    assert_equal(computed, full, atol=1e-11)


@pytest.mark.parametrize(
    "size, keys",
    [
        (5, 128),
        (130, 150),
        pytest.param(5, 150, marks=pytest.mark.slow),
        pytest.param(130, 7, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_tables_add_up(size, keys):
    """By binary search where positions descend, and else one by one."""
    rng = np.random.default_rng(0)
    rising = rng.uniform(0, size - 1, (16, keys)).astype(np.float32)
    rising[:, 0] = size - 1
    dy = rng.normal(size=rising.shape).astype(np.float32)
    for p, descending in ((-np.sort(-rising), True), (-np.sort(-rising), False), (rising, False)):
        weights = np.maximum(0, 1 - abs(p[..., None] - np.arange(size)))
        computed = jax.jit(tpu_ops.gather_up, static_argnames=("size", "descending"))(
            p, dy, size=size, descending=descending
        )
        np.testing.assert_allclose(
            computed, (dy[..., None] * weights).sum(axis=1), rtol=0, atol=2e-5
        )
    indices = rising.astype(np.int32)
    added = jax.jit(tpu_ops.add_rows, static_argnames="size")(indices, dy, size=size)
    np.testing.assert_allclose(
        added, (dy[..., None] * (indices[..., None] == np.arange(size))).sum(axis=1), atol=2e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_rounds_no_more_than_blockwise_attention(dtype, x64):
    sizes, spec = (
        Sizes(heads=2, kv_heads=1, head_dim=8, model_dim=4, max_length=64),
        "cope(npos_max=6,gate=value)",
    )
    graphdef, state = build(spec, sizes=sizes)
    arrays, data = arrays_of(64, 64, batch=1, sizes=sizes), plain(64, 64, 1)
    kernels = interpreted((32, 16, 32))
    run = jax.jit(
        lambda state, arrays: value_and_gradients(kernels, graphdef, state, arrays, data)[0]
    )
    low = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
    # The gates of rounded values, so that only the kernel's own rounding counts.
    exact = run(state, jax.tree.map(lambda x: np.asarray(x, np.float64), low))
    computed = run(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state), low)
    assert computed.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(computed, np.float64), exact, rtol=0, atol=2e-5 if dtype == np.float32 else 2e-2
    )


def why_not(encoding, request, **options):
    """Returns the reason that there is no plan on this device, or None."""
    answer = tpu_attention.plan(encoding, request, **options)
    return answer.why if isinstance(answer, Reason) else None


def arguments(name="cope", dtype="float32", length=32, head_dim=8, **options):
    encoding = encodings.create(
        name, num_heads=2, head_dim=head_dim, max_length=64, rngs=nnx.Rngs(0)
    )
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, 2, head_dim), dtype)
    return encoding, prepare(q, k, v, encoding=encoding, embedded=True, **options)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "cope_two_sided"}, "the encoding needs all keys in one block"),
        ({"mask": np.ones((1, 1, 32, 32), bool)}, "a mask is given"),
        ({"length": 0}, "there are no queries"),
        (
            {"name": "fire(hidden=65)"},
            r"its hooks cannot be traced in a kernel \(65 hidden units are more than 64\)",
        ),
        ({"name": "cope(npos_max=1025)"}, "a table has 1025 columns, more than 1024"),
    ],
)
def test_what_the_kernels_cannot_run_has_a_reason(given, reason):
    answer = tpu_attention.plan(*arguments(**given, blocks=(16, 128, 128)), interpret=True)
    assert (
        isinstance(answer, Reason)
        and re.match(reason, answer.why)
        and answer.fix.startswith("choose 'auto'")
    )


def test_fewer_keys_are_in_fast_memory_if_they_are_long():
    def parts(width, dtype, keys=16384):
        x = jax.ShapeDtypeStruct((1, 1, keys, width), dtype)
        return tpu_attention.parts_of(keys, BlockSizes(128, 128, 512), x, x)

    assert parts(64, jnp.bfloat16) == parts(128, jnp.bfloat16) == (2, 8192)
    assert parts(128, jnp.float32) == parts(256, jnp.bfloat16) == (4, 4096)
    assert parts(256, jnp.float32) == (8, 2048)


def test_more_segments_than_scalar_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(tpu_attention, "SPAN_BYTES", 16 * 2)  # two examples of one block of queries
    ids = np.zeros((3, 32), np.int32)

    def reason(batch, **options):
        encoding = encodings.create("rope", num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
        x = jnp.ones((batch, 32, 2, 8))
        options |= {
            "q_segment_ids": ids[:batch],
            "k_segment_ids": ids[:batch],
            "blocks": (32, 32, 32),
        }
        return why_not(encoding, prepare(x, x, x, encoding=encoding, **options), interpret=True)

    assert reason(2) is None
    with jax.set_mesh(
        jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    ):
        assert reason(3, batch_axes=("data",)) is None  # each device has one example
    assert "does not hold what 3 × 1 blocks of queries see" in reason(3)


@pytest.mark.parametrize(
    ("given", "blocks", "reason"),
    [
        ({"dtype": "float16"}, None, "the type is float16, not float32 or bfloat16"),
        ({}, BlockSizes(16, 100, 100), "blocks must have a multiple of 16 queries and of 128 keys"),
        ({}, BlockSizes(20, 128, 128), "blocks must have a multiple of 16 queries and of 128 keys"),
        ({}, None, None),
    ],
)
def test_what_a_tpu_cannot_run_has_a_reason(given, blocks, reason, monkeypatch):
    monkeypatch.setattr(placement, "current_device", lambda: "TPU v5 lite")
    computed = why_not(*arguments(**given, blocks=blocks))
    assert computed is None if reason is None else computed.startswith(reason)


def test_devices_that_cannot_share_have_a_reason(monkeypatch):
    monkeypatch.setattr(placement, "current_device", lambda: "TPU v5 lite")
    auto, explicit = (
        jax.make_mesh((2,), ("tensor",), (kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    with jax.set_mesh(auto):
        assert (
            why_not(*arguments())
            == "axis 'tensor' of the mesh splits neither the batch nor the heads"
        )
        assert why_not(*arguments(head_axis="tensor")) is None
        assert why_not(*arguments(batch_axes=["tensor"])) is None
    with jax.set_mesh(explicit):
        assert "type Explicit" in why_not(*arguments(head_axis="tensor"))
    with jax.set_mesh(jax.make_mesh((4,), ("tensor",), (AxisType.Auto,))):
        assert "does not divide 2 key heads" in why_not(*arguments(head_axis="tensor"))


def test_chips_without_gathers_run_what_needs_none(monkeypatch):
    monkeypatch.setattr(placement, "current_device", lambda: "TPU v4")
    assert why_not(*arguments("cope")) == "a kernel has no look_up on TPU v4"
    assert why_not(*arguments("cope(position=slope)+rope")) is None


def test_auto_says_which_implementation_runs_and_why(monkeypatch, caplog):
    """Other devices have no kernel, and "auto" then takes blockwise attention; "fused" says so."""
    encoding, _ = arguments()
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 8))
    monkeypatch.setattr(placement, "current_device", lambda: "TPU v2")
    with pytest.raises(
        ConfigError,
        match="there is no kernel for the device 'TPU v2': choose 'auto' or 'blockwise'",
    ):
        attend(q, k, v, encoding=encoding, implementation="fused")
    monkeypatch.setattr(placement, "current_device", lambda: "TPU v5 lite")
    placement.log_choice.cache_clear()
    mask = np.ones((1, 1, 128, 128), bool)
    with caplog.at_level(logging.INFO, "cope_jax"):
        for _ in range(2):
            jax.eval_shape(lambda: attend(q, k, v, encoding=encoding, mask=mask))
        jax.eval_shape(lambda: attend(q, k, v, encoding=encoding))
    assert [record.message.partition(", and")[0] for record in caplog.records] == [
        "attention: blockwise, because a mask is given",
        "attention: fused",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_devices_share_examples_and_heads(axes, x64):
    graphdef, state = build("cope(npos_max=4)+alibi")
    arrays, data = arrays_of(LENGTH, KEYS), plain(LENGTH, KEYS)
    kernels = interpreted(BLOCKS)

    def split(encoding, request):
        layout = Layout(batch=("data",), width="tensor")
        return placement.shard_batch(kernels, encoding, dataclasses.replace(request, layout=layout))

    run = jax.jit(lambda state, arrays: value_and_gradients(kernels, graphdef, state, arrays, data))
    whole = run(state, arrays)
    with jax.set_mesh(
        jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    ):
        computed = jax.jit(
            lambda state, arrays: value_and_gradients(split, graphdef, state, arrays, data)
        )(state, arrays)
    assert_equal(computed, whole)


def test_the_default_device_decides(monkeypatch):
    """A TPU's host may also run a program on its CPU."""
    monkeypatch.setattr(
        jax, "devices", lambda name=None: [Device("cpu" if name == "cpu" else "TPU v5 lite")]
    )
    assert placement.current_device() == "TPU v5 lite"
    with jax.default_device("cpu"):
        assert placement.current_device() == "cpu"


class Device(NamedTuple):
    """A device by its kind."""

    device_kind: str
