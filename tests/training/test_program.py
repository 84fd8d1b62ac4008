"""Batches reach devices as drawn, of one process or several; the step lowers without any."""

import types

import chex
import jax
import numpy as np
import pytest

from cope_jax.training import sharding
from cope_jax.training.experiment_config import MeshConfig
from tests.training import tiny

pytestmark = pytest.mark.newest
MESHES = {
    "one device": {},
    "data": {"data": 4},
    "data and fsdp": {"data": 2, "fsdp": 2},
    "all but data": {"fsdp": 2, "tensor": 2, "sequence": 2},
    "tensor and sequence": {"tensor": 2, "sequence": 4},
}
STEPS = 3


def program(axes, width=1):
    return tiny.program(width, MeshConfig(**{"data": 1, **axes}))


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
        assert actual[name].dtype == array.dtype


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_what_is_placed_is_the_batch(axes, width):
    made = program(axes, width)
    stacked = made.seed_batch.stack([tiny.batches(STEPS), tiny.batches(STEPS + 1)][:1] * width)
    if width > 1:
        stacked["inputs"][1] += 1  # the seeds have batches of their own
    assert made.rows(tiny.BATCH).tolist() == [0, 1, 2, 3]
    placed = made.place(stacked, tiny.BATCH)
    assert_same(placed, stacked)
    devices = made.mesh.shape["data"] * made.mesh.shape["fsdp"]
    for array in placed.values():
        assert array.sharding.is_equivalent_to(made.batch_sharding, array.ndim)
        assert {shard.data.shape[-2] for shard in array.addressable_shards} == {
            tiny.BATCH // devices
        }


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_have_their_rows_alone_place_the_same_batch(
    processes, axes, width, monkeypatch
):
    """Each process is asked for the rows of its devices, neighbours or not, and has no others."""
    made = program(axes, width)
    devices = list(made.mesh.devices.flat)
    batches = made.seed_batch.stack([tiny.batches(STEPS)] * width)
    lead = (slice(None),) * (width > 1)
    for number in range(processes):
        for devices_here in (
            devices[number::processes],
            devices[number * len(devices) // processes :][:1],
        ):
            if not devices_here:
                continue

            def local(sharding, shape, devices_here=devices_here):
                return {
                    d: i
                    for d, i in sharding.devices_indices_map(shape).items()
                    if d in devices_here
                }

            def fill(shape, sharding, read, devices_here=devices_here):
                filled = np.full(shape, -1, np.int32)
                for index in local(sharding, shape, devices_here).values():
                    filled[index] = read(index)
                return filled

            by_rows = made._by_rows
            here = types.SimpleNamespace(
                addressable_devices_indices_map=lambda shape, s=by_rows: local(s, shape)
            )
            with monkeypatch.context() as patch:
                patch.setattr(made, "_by_rows", here)
                patch.setattr(jax, "make_array_from_callback", fill)
                rows = made.rows(tiny.BATCH)
                mine = {name: array[(*lead, slice(None), rows)] for name, array in batches.items()}
                placed = made.place(mine, tiny.BATCH)
            others = np.setdiff1d(np.arange(tiny.BATCH), rows)
            for name, array in batches.items():
                assert placed[name].shape == array.shape
                np.testing.assert_array_equal(
                    placed[name][(*lead, slice(None), rows)], mine[name].astype(np.int32)
                )
                assert (placed[name][(*lead, slice(None), others)] == -1).all(), (
                    "of other processes"
                )


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_what_every_process_has_whole_is_placed_by_rows(axes):
    made = program(axes)
    batch = tiny.batch() | {"positions": np.arange(tiny.LENGTH, dtype=np.int32)[None]}
    placed = made.place_whole(batch)
    assert_same(placed, batch)
    devices = made.mesh.shape["data"] * made.mesh.shape["fsdp"]
    assert placed["positions"].sharding.is_fully_replicated
    assert placed["inputs"].addressable_shards[0].data.shape == (tiny.BATCH // devices, tiny.LENGTH)


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_step_lowers_without_data_and_gives_its_state_away(width):
    made = program(MESHES["all but data"], width)
    lowered = made.lower(tiny.batch(), STEPS)
    (state, batches), options = lowered.args_info
    assert not options
    lead = (width,) * (width > 1)
    assert {name: array.shape for name, array in batches.items()} == dict.fromkeys(
        ("inputs", "targets", "weights"), (*lead, STEPS, tiny.BATCH, tiny.LENGTH)
    )
    assert all(leaf.donated for leaf in jax.tree.leaves(state))
    assert not any(array.donated for array in batches.values())
    after, metrics = lowered.out_info
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), made.state_shapes()
    )
    assert {name: array.shape for name, array in metrics.items()} == dict.fromkeys(
        ("loss", "grad_norm", "update_norm", "learning_rate", "finite"), (*lead, STEPS)
    )


def test_steps_are_compiled_with_the_options_of_the_mesh(monkeypatch):
    monkeypatch.setattr(sharding, "compiler_options", lambda mesh: {f"no_option_of_{mesh.size}": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_option_of_1"):
        tiny.program.__wrapped__().lower(tiny.batch()).compile()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_what_a_run_starts_from_is_not_drawn(width):
    """Some parameters are given, split over the mesh; others are drawn as without them."""
    made = program({"fsdp": 2, "tensor": 2}, width)
    table = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    expected = jax.device_get(made.init([0, 1][:width]).params)
    params = made.init([0, 1][:width], {"blocks": {"encoding": {"cope": {"table": table}}}}).params
    expected["blocks"]["encoding"]["cope"]["table"] = (
        np.stack([table, table]) if width > 1 else table
    )
    chex.assert_trees_all_equal(jax.device_get(params), expected)
    assert params["out"]["kernel"].sharding == made.state_shardings.params["out"]["kernel"]
