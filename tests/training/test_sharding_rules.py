"""The table of logical axes: which mesh axis splits them, and the mistakes it finds."""

import dataclasses
import types

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cope_jax import encodings
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import Layout
from cope_jax.models.decoder import DecoderConfig
from cope_jax.training.experiment_config import MeshConfig, OptimizerConfig
from cope_jax.training.optimizer import create_optimizer
from cope_jax.training.sharding import (
    AXES,
    RULES,
    check_sizes,
    compiler_options,
    create_mesh,
    layout_of,
    optimizer_specs,
    parameter_specs,
    rows_here,
    spec_of,
)
from tests.training import tiny

SIZES = {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2}


@pytest.mark.parametrize(
    "shape, axes, sizes, expected",
    [
        ((8, 6), ("embed", "mlp"), {"fsdp": 2, "tensor": 3}, P("fsdp", "tensor")),
        ((8, 6), ("embed", "mlp"), {"fsdp": 1, "tensor": 3}, P(None, "tensor")),
        ((3, 8, 6), ("heads", "embed"), {"fsdp": 2, "tensor": 2}, P(None, "tensor", "fsdp")),
        ((2, 3, 8), ("kv_heads",), {"tensor": 4}, P(None, None, "tensor")),
        ((5, 8), ("vocab", "embed"), {"fsdp": 2, "tensor": 2}, P(None, "fsdp")),
        ((6, 8), ("vocab", "embed"), {"fsdp": 2, "tensor": 2}, P("tensor", "fsdp")),
        ((5,), (), {"fsdp": 2}, P(None)),
        ((4, 4), (None, "embed"), {"fsdp": 2}, P(None, "fsdp")),
    ],
)
def test_named_axes_are_split_and_the_rest_is_whole(shape, axes, sizes, expected):
    assert spec_of("kernel", shape, axes, sizes) == expected


def test_products_on_tpus_wait_for_whole_parameters():
    """Other compilers refuse the option."""
    options = {
        platform: compiler_options(
            types.SimpleNamespace(devices=np.array([[types.SimpleNamespace(platform=platform)]]))
        )
        for platform in ("cpu", "gpu", "tpu")
    }
    threshold = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
    assert options == {"cpu": {}, "gpu": {}, "tpu": {threshold: 2**20}}


def test_two_axes_that_meet_on_one_axis_of_the_mesh_collide():
    with pytest.raises(
        ValueError, match=r"the axes \('heads', 'mlp'\) of mlp\.kernel collide"
    ) as error:
        spec_of("mlp.kernel", (4, 4), ("heads", "mlp"), SIZES)
    assert not isinstance(error.value, ConfigError)  # no user can mend it
    assert spec_of("mlp.kernel", (4, 4), ("heads", "mlp"), {"tensor": 1}) == P(None, None)


def test_an_axis_that_the_table_does_not_have_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"the logical axis 'mlpp' of kernel is not in RULES: choose one of \['embed'",
    ):
        spec_of("kernel", (4, 4), ("embed", "mlpp"), {})


def test_a_size_that_the_devices_do_not_divide_is_one_clear_line():
    with pytest.raises(ConfigError) as error:
        spec_of("blocks.mlp.inner.kernel", (2, 8, 6), ("embed", "mlp"), {"fsdp": 2, "tensor": 4})
    assert (
        str(error.value)
        == "the size 6 of mlp in blocks.mlp.inner.kernel must be a multiple of job.mesh.tensor=4"
    )


def test_the_table_knows_axes_of_the_mesh_only():
    assert set(RULES.values()) <= set(AXES)
    assert set(AXES) == {field.name for field in dataclasses.fields(MeshConfig)}


BLOCK = BlockConfig(
    model_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32, activation="swiglu"
)
MATRICES = {
    "embedding/embedding": ("tensor", "fsdp"),
    "out/kernel": ("fsdp", "tensor"),
    "blocks/attention/query/kernel": (None, "fsdp", "tensor"),
    "blocks/attention/key/kernel": (None, "fsdp", "tensor"),
    "blocks/attention/value/kernel": (None, "fsdp", "tensor"),
    "blocks/attention/out/kernel": (None, "tensor", "fsdp"),
    "blocks/mlp/inner/kernel": (None, "fsdp", "tensor"),
    "blocks/mlp/gate/kernel": (None, "fsdp", "tensor"),
    "blocks/mlp/outer/kernel": (None, "tensor", "fsdp"),
}


def specs(**changes):
    options = {
        "vocab_size": 8,
        "max_length": 8,
        "encoding": EncodingConfig.parse("none"),
        "block": BLOCK,
    }
    learner = dataclasses.replace(tiny.create_learner(), model=DecoderConfig(**options | changes))
    return learner, parameter_specs(learner.variables(), SIZES)


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, P))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("sharing", ["layer", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*encodings.names(), "cope(gate=separate_key)", "learned+cope(gate=value)+t5"]
)
def test_every_parameter_of_a_decoder_has_its_place(name, sharing):
    learner, specs_of = specs(encoding=EncodingConfig.parse(name), encoding_sharing=sharing)
    params = jax.eval_shape(learner.init, np.int32(0)).params
    assert jax.tree.structure(params) == jax.tree.structure(
        specs_of, is_leaf=lambda leaf: isinstance(leaf, P)
    )
    assert {
        path: tuple(spec) for path, spec in flat(specs_of).items() if path in MATRICES
    } == MATRICES
    assert {
        path
        for path, spec in flat(specs_of).items()
        if path.endswith("kernel") and "encoding" not in path and None not in (spec[-1], spec[-2])
    } == set(MATRICES) - {"embedding/embedding"}


@pytest.mark.parametrize(
    "block, missing",
    [
        ({"activation": "gelu", "num_kv_heads": None}, {"blocks/mlp/gate/kernel"}),
        ({"use_bias": False, "norm": "rms", "norm_position": "post"}, set()),
    ],
)
def test_every_kind_of_block_has_its_places(block, missing):
    _, specs_of = specs(block=dataclasses.replace(BLOCK, **block))
    assert {path for path in MATRICES if path not in flat(specs_of)} == missing
    assert {
        path: tuple(spec) for path, spec in flat(specs_of).items() if path in MATRICES
    }.items() <= MATRICES.items()


def test_what_an_encoding_has_for_each_head_is_split_with_the_heads():
    _, specs_of = specs(encoding=EncodingConfig.parse("fox+t5"))
    split = {
        path.split("/")[-1]: tuple(spec)
        for path, spec in flat(specs_of).items()
        if "encoding" in path
    }
    assert split == {
        "kernel": (None, "fsdp", "tensor"),
        "bias": (None, "tensor"),
        "table": (None, None, "tensor"),
    }


def test_biases_follow_the_outputs_and_a_tied_table_has_no_output():
    _, specs_of = specs(tie_embeddings=True)
    specs_of = flat(specs_of)
    assert "out/kernel" not in specs_of
    assert tuple(specs_of["blocks/attention/query/bias"]) == (None, "tensor")
    assert tuple(specs_of["blocks/attention/out/bias"]) == (None, "fsdp")
    assert tuple(specs_of["norm/norm/scale"]) == (None,)


def test_moments_lie_as_their_parameters_and_counts_are_whole():
    params = {
        "a": jax.ShapeDtypeStruct((4, 4), "float32"),
        "b": {"c": jax.ShapeDtypeStruct((2,), "float32")},
    }
    indices = {"a": P("fsdp", "tensor"), "b": {"c": P(None)}}
    moments = optimizer_specs(create_optimizer(OptimizerConfig(), 1000), params, indices)
    assert optax.tree.get(moments, "mu") == indices
    assert optax.tree.get(moments, "nu") == indices
    rest = [
        leaf
        for leaf in jax.tree.leaves(moments, is_leaf=lambda leaf: isinstance(leaf, P))
        if len(leaf) == 0
    ]
    assert len(rest) == 2  # Adam's count, and the schedule's


@pytest.mark.parametrize(
    "config, message",
    [
        (
            MeshConfig(data=16),
            "job.mesh data=16 × fsdp=1 × tensor=1 × sequence=1 asks for 16 devices, but there are 8: set smaller sizes",
        ),
        (
            MeshConfig(data=2, fsdp=2, tensor=4),
            "job.mesh data=2 × fsdp=2 × tensor=4 × sequence=1 asks for 16 devices, but there are 8: set smaller sizes",
        ),
        (
            MeshConfig(tensor=3),
            "job.mesh data=-1 × fsdp=1 × tensor=3 × sequence=1 needs a multiple of 3 devices, got 8: "
            "set sizes whose product divides 8",
        ),
        (
            MeshConfig(tensor=16),
            "job.mesh data=-1 × fsdp=1 × tensor=16 × sequence=1 needs a multiple of 16 devices, got 8: "
            "set sizes whose product divides 8",
        ),
    ],
)
def test_a_mesh_that_the_devices_do_not_make_is_one_clear_line(config, message):
    with pytest.raises(ConfigError) as error:
        create_mesh(config)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "config, shape",
    [
        (MeshConfig(), (8, 1, 1, 1)),
        (MeshConfig(data=1), (1, 1, 1, 1)),
        (MeshConfig(data=1, fsdp=-1, tensor=2), (1, 4, 1, 2)),
        (MeshConfig(data=1, fsdp=2, tensor=1, sequence=3), (1, 2, 3, 1)),
    ],
)
def test_a_mesh_has_its_axes_and_the_first_devices(config, shape):
    mesh = create_mesh(config)
    assert mesh.axis_names == ("data", "fsdp", "sequence", "tensor")
    assert mesh.devices.shape == shape
    assert set(mesh.devices.flat) == set(jax.devices()[: mesh.size])
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_several_processes_must_use_all_devices():
    devices = [types.SimpleNamespace(process_index=i // 2) for i in range(4)]
    with pytest.raises(ConfigError, match="several processes must use all: set one axis to -1"):
        create_mesh(MeshConfig(data=2), devices)


@pytest.mark.parametrize(
    "config, expected",
    [
        (MeshConfig(data=1), Layout()),
        (MeshConfig(), Layout(batch=("data",))),
        (MeshConfig(data=1, fsdp=2, tensor=2, sequence=2), Layout(("fsdp",), "sequence", "tensor")),
        (MeshConfig(data=2, fsdp=2), Layout(("data", "fsdp"))),
    ],
)
def test_an_axis_of_one_device_splits_nothing(config, expected):
    assert layout_of(create_mesh(config)) == expected


@pytest.mark.parametrize(
    "config, block, sizes, message",
    [
        (
            MeshConfig(data=2, fsdp=2),
            BLOCK,
            {"training.batch_size": 8, "evaluation.batch_size": 6},
            "evaluation.batch_size=6 cannot be split evenly over the 4 devices of job.mesh data × fsdp: "
            "choose a multiple of 4, or set --config.job.mesh.data",
        ),
        (
            MeshConfig(data=1, tensor=8),
            BLOCK,
            {},
            "model.block.num_kv_heads=4 must be a multiple of job.mesh.tensor=8",
        ),
        (
            MeshConfig(data=1, tensor=3),
            BlockConfig(num_heads=8),
            {},
            "model.block.num_heads=8 must be a multiple of job.mesh.tensor=3",
        ),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_one_clear_line(config, block, sizes, message):
    with pytest.raises(ConfigError) as error:
        check_sizes(create_mesh(config), block, sizes)
    assert str(error.value) == message


def test_sizes_that_the_mesh_divides_are_no_error():
    check_sizes(
        create_mesh(MeshConfig(data=1, fsdp=2, tensor=4)), BLOCK, {"training.batch_size": 6}
    )
    check_sizes(create_mesh(MeshConfig(data=1, sequence=8)), BLOCK, {"training.batch_size": 1})


def test_the_rows_of_a_process_are_those_of_its_devices_ascending_and_once():
    slices = {0: slice(4, 6), 1: slice(0, 2), 2: slice(4, 6)}  # two devices have the same rows
    sharding = types.SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {d: (s,) for d, s in slices.items()}
    )
    assert rows_here(sharding, 8).tolist() == [0, 1, 4, 5]
