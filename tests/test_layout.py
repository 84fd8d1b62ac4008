"""Activations lie where the layout says, and are left alone where it says nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from tests.ops.jaxprs import equations

pytestmark = pytest.mark.newest
SPLIT = Layout(batch=("data", "fsdp"), length="sequence", width="tensor")


@pytest.fixture
def mesh():
    axes = ("data", "fsdp", "sequence", "tensor")
    return jax.make_mesh((2, 1, 2, 2), axes, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize(
    "layout, axes, expected",
    [
        (SPLIT, ("batch", "length", "width", None), (("data", "fsdp"), "sequence", "tensor", None)),
        (SPLIT, ("width", "batch"), ("tensor", ("data", "fsdp"))),
        (Layout(batch=("fsdp",)), ("batch", "length", "width"), ("fsdp", None, None)),
        (WHOLE, ("batch", "length", "width"), (None, None, None)),
    ],
)
def test_the_spec_of_an_activation(layout, axes, expected):
    assert layout.spec(*axes) == PartitionSpec(*expected)


def test_an_activation_is_held_to_its_layout(mesh):
    with jax.set_mesh(mesh):
        x = jax.jit(
            lambda: SPLIT.constrain(jnp.arange(64.0).reshape(4, 4, 4), "batch", "length", "width")
        )()
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 2, 2)}
    assert x.tolist() == jnp.arange(64.0).reshape(4, 4, 4).tolist()


def test_an_axis_that_cannot_be_shared_evenly_is_whole(mesh):
    with jax.set_mesh(mesh):
        x = jax.jit(lambda: SPLIT.constrain(jnp.zeros((4, 3, 5)), "batch", "length", "width"))()
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 3, 5)}


@pytest.mark.parametrize("layout", [Layout(length="strip"), SPLIT])
def test_a_mesh_without_the_axis_is_one_clear_line(layout, mesh):
    x = jnp.zeros((4, 4))
    with pytest.raises(
        ConfigError,
        match=r"needs a mesh with the axis '(strip|data)': call under jax.set_mesh\(mesh\)",
    ):
        if layout is SPLIT:
            layout.constrain(x, "batch", None)
        else:
            with jax.set_mesh(mesh):
                layout.constrain(x, None, "length")


def test_what_is_whole_is_left_alone_and_needs_no_mesh():
    x = jnp.ones((4, 4))
    assert not equations(lambda x: WHOLE.constrain(x, "batch", "length"), x)
    assert not equations(lambda x: SPLIT.constrain(x, None, None), x)


def test_a_parameter_that_is_on_no_mesh_may_be_read_outside_of_jit(mesh):
    x = jnp.ones((4, 4))
    with jax.set_mesh(mesh):
        assert SPLIT.constrain(x, None, None) is x
        assert equations(lambda x: SPLIT.constrain(x, None, None), x)
