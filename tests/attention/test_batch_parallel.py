"""Each device attends for its own examples, and that is the attention of all."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cope_jax import encodings
from cope_jax.attention import attend, full_attention, placement, ring
from cope_jax.errors import ConfigError
from cope_jax.layout import Layout
from tests.attention.problems import (
    arrays_of,
    assert_equal,
    in_blocks,
    plain,
    ran,
    value_and_gradients,
)
from tests.encodings.cases import build

pytestmark = pytest.mark.xdist_group("ring")
BATCH, LENGTH = 4, 6
AXES = ("data", "fsdp")
BLOCKWISE, RING = in_blocks((2, 3, 2)), in_blocks((2, 1, 2), lambda *call: ran(ring.plan(*call)))


def test_more_examples_than_groups_of_heads(x64):
    graphdef, state = build("alibi")  # of two groups
    results = [
        jax.jit(functools.partial(value_and_gradients, how, graphdef))(
            state, arrays_of(LENGTH, LENGTH, batch=BATCH), plain(LENGTH, LENGTH, BATCH)
        )
        for how in (BLOCKWISE, full_attention)
    ]
    assert_equal(*results)


def mesh_of(data=2, fsdp=2, sequence=1):
    shape = (data, fsdp, sequence)
    names = ("data", "fsdp", "sequence")
    return jax.make_mesh(
        shape,
        names,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[: data * fsdp * sequence],
    )


@pytest.mark.parametrize(
    "spec, how, mesh, positions, options",
    [
        # Features of the batch; a row of positions and segments for each example.
        pytest.param(
            "cope(npos_max=4,gate=separate_key)+t5",
            BLOCKWISE,
            {},
            "each",
            {"dropout_rate": 0.3},
            marks=pytest.mark.slow,
        ),
        ("cope(npos_max=3,gate=value)+rope", full_attention, {"fsdp": 1}, "one", {"window": 4}),
        pytest.param(
            *("learned+cope(npos_max=4)", RING, {"sequence": 2}, "one", {"dropout_rate": 0.3}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["blockwise", "full", "ring"],
)
def test_it_equals_attention_without_it(spec, how, mesh, positions, options, x64):
    """In value and every gradient, that of the parameters, which all devices share, among them."""
    graphdef, state = build(spec)
    mesh = mesh_of(**mesh)
    axes = [axis for axis in AXES if mesh.shape[axis] > 1]
    rng = np.random.default_rng(0)
    arrays, data = arrays_of(LENGTH, LENGTH, batch=BATCH), plain(LENGTH, LENGTH, batch=BATCH)
    offset = {"each": rng.integers(0, 3, (BATCH, 1)), "one": np.array([[5]])}[positions]
    places = (np.arange(LENGTH) // 2 + offset).astype(np.int32)
    segments = np.sort(rng.integers(0, 2, (BATCH, LENGTH))).astype(np.int32)
    key = jax.random.key(1) if "dropout_rate" in options else None
    data = data._replace(
        q_positions=places, k_positions=places, q_segments=segments, k_segments=segments
    )
    mask = None if how is RING else rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.7
    data = data._replace(q_indices=None, k_indices=None, mask=mask, dropout_key=key)

    def run(how, state, arrays, data):
        return value_and_gradients(how, graphdef, state, arrays, data, **options)

    def split(encoding, request):
        layout = Layout(batch=tuple(axes), length="sequence" if how is RING else None)
        return placement.shard_batch(how, encoding, dataclasses.replace(request, layout=layout))

    whole = BLOCKWISE if how is RING else how
    exact = jax.jit(functools.partial(run, whole))(state, arrays, data)
    with jax.set_mesh(mesh):
        computed = jax.jit(functools.partial(run, split))(state, arrays, data)
    assert_equal(computed, exact)


def test_it_runs_op_by_op_too():
    encoding = encodings.create("rope", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    q, k, v = jax.random.normal(jax.random.key(0), (3, BATCH, LENGTH, 2, 4))
    with jax.set_mesh(mesh_of()):
        out = attend(q, k, v, encoding=encoding, batch_axes=AXES)
        last = attend(q[:, 4:], k, v, encoding=encoding, batch_axes=AXES)
    np.testing.assert_allclose(last, out[:, 4:], rtol=0, atol=1e-6)
    assert {shard.data.shape[0] for shard in out.addressable_shards} == {1}
    np.testing.assert_allclose(out, attend(q, k, v, encoding=encoding), rtol=0, atol=1e-6)


@pytest.mark.newest
def test_the_gradient_of_cope_exchanges_that_of_its_table_alone():
    """The compiler, left alone, adds up the rows of all examples on every device, since each may
    scatter into any.
    """
    graphdef, state = build("cope(npos_max=3)", dtype=np.float32)
    arrays = arrays_of(LENGTH, LENGTH, batch=8, dtype=np.float32)
    mesh = mesh_of(data=4)
    split = NamedSharding(mesh, PartitionSpec(AXES))
    arrays = {name: jax.device_put(array, split) for name, array in arrays.items()}

    def loss(state, q, k, v):
        out = attend(q, k, v, encoding=nnx.merge(graphdef, state), batch_axes=AXES)
        return jnp.sum(out * arrays["dout"])

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        lowered = gradient.lower(state, *(arrays[name] for name in "qkv"))
    assert "stablehlo.scatter" in lowered.as_text(), "CoPE's gradient adds up by scattering"
    text = lowered.compile().as_text()
    talk = re.findall(r"= (\S+?)(?:{\S*)? ((?:all|collective|reduce)-\w+)(?:-start)?\(", text)
    assert talk == [("f32[3,4]", "all-reduce")], "the table's gradient, which all devices share"


def test_heads_that_are_split_exchange_as_little():
    """Here the compiler is left alone, so rows are added to one by one: a flat scatter it would
    gather.
    """
    graphdef, state = build("cope(npos_max=3)", dtype=np.float32)
    arrays = arrays_of(LENGTH, LENGTH, batch=4, dtype=np.float32)
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    split = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    arrays = {name: jax.device_put(array, split) for name, array in arrays.items()}

    def loss(state, q, k, v):
        return jnp.sum(
            attend(q, k, v, encoding=nnx.merge(graphdef, state), batch_axes=("data",))
            * arrays["dout"]
        )

    with jax.set_mesh(mesh):
        program = (
            jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
            .lower(state, *(arrays[name] for name in "qkv"))
            .compile()
        )
    talk = re.findall(
        r"= (\S+?)(?:{\S*)? ((?:all|collective|reduce)-\w+)(?:-start)?\(", program.as_text()
    )
    assert set(talk) == {("f32[3,4]", "all-reduce")}, (
        "the table's gradient, over heads and over examples"
    )


@pytest.mark.parametrize(
    "axes, mesh, message",
    [
        (("datas",), mesh_of, "unknown axis of the mesh 'datas': did you mean 'data'"),
        (("data",), None, "unknown axis of the mesh 'data'"),
        (
            ("data", "fsdp"),
            lambda: mesh_of(4, 2),
            "a batch of 4 cannot be split over data × fsdp = 8 devices",
        ),
    ],
)
def test_mistakes_are_one_clear_line(axes, mesh, message):
    encoding = encodings.create("none", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    x = jnp.ones((BATCH, LENGTH, 2, 4))
    with pytest.raises(ConfigError) as error:
        if mesh is None:
            attend(x, x, x, encoding=encoding, batch_axes=axes)
        else:
            with jax.set_mesh(mesh()):
                attend(x, x, x, encoding=encoding, batch_axes=axes)
    assert message in str(error.value) and "\n" not in str(error.value)
