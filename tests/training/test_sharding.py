"""A mesh of eight devices trains as one device does, however its axes are used."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import WHOLE
from cope_jax.models.decoder import DecoderConfig
from cope_jax.training import from_config, sharding
from cope_jax.training.experiment_config import MeshConfig, OptimizerConfig
from cope_jax.training.learner import Learner
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.program import Program, SeedBatch
from cope_jax.training.summary import bytes_a_device
from tests.training import tiny

pytestmark = pytest.mark.xdist_group("sharding")

# 8 symbols: a vocabulary that two devices share; sequences of 7 tokens, which no axis divides.
TASK = tasks.create("selective_copy", num_symbols=6, num_tokens=2, num_blanks=4)
BATCH = 8
MODEL = DecoderConfig(
    vocab_size=TASK.vocab_size,
    max_length=TASK.max_length,
    encoding=EncodingConfig.parse("learned+cope(npos_max=4)"),
    block=BlockConfig(
        model_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32, activation="swiglu"
    ),
)
MESHES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 4},
    "sequence": {"sequence": 4},
    "all but data": {"fsdp": 2, "tensor": 2, "sequence": 2},
}
FAST = ("all but data",)
MORE_MESHES = {
    "sequence, a token each": {"sequence": 8},
    "data and fsdp": {"data": 2, "fsdp": 4},
    "fsdp and tensor": {"fsdp": 4, "tensor": 2},
    "data and sequence": {"data": 2, "sequence": 4},
    "tensor and sequence": {"tensor": 2, "sequence": 4},
}
# Features of the keys, and a bias of the pairs; it takes long to compile.
RICH = "learned+cope(npos_max=4,gate=separate_key)+t5"
ONE = MeshConfig(data=1)
KEY = jax.random.key(9)


def mesh_config(axes):
    return MeshConfig(**{"data": 1, **axes})


def learner(layout=WHOLE, accumulate=1, encoding=None, **changes):
    config = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0)
    if encoding is not None:
        changes["encoding"] = EncodingConfig.parse(encoding)
    model = dataclasses.replace(MODEL, layout=layout, **changes)
    optimizer, schedule = create_optimizer(config, 9), create_schedule(config, 9)
    return Learner(model, optimizer, schedule, model.max_length, accumulate=accumulate)


@functools.cache
def program(mesh, width=1, accumulate=1, **changes):
    devices = sharding.create_mesh(mesh)
    return Program(
        learner(sharding.layout_of(devices), accumulate, **changes), SeedBatch(width), devices
    )


def batches(count=2):
    drawn = [TASK.sample(np.random.default_rng([5, number]), BATCH) for number in range(count)]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *drawn)


def train(program, seeds=(3,), count=2):
    stacked = program.seed_batch.stack([batches(count)] * len(seeds))
    return program.train_steps(program.init(seeds), program.place(stacked, BATCH))


def named(tree):
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_no_array_is_copied_to_all_devices_to_be_split_anew(capfd):
    """XLA then warns of an involuntary full rematerialization, as for the embedding's gradient."""
    mesh = sharding.create_mesh(mesh_config({"data": 2, "fsdp": 4}))
    fresh = Program(learner(sharding.layout_of(mesh), encoding="rope"), SeedBatch(1), mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fresh.batch_sharding), batches(1)
    )
    with jax.set_mesh(mesh):
        fresh._train_steps.lower(fresh.state_shapes(), batch).compile()
    assert "rematerialization" not in capfd.readouterr().err


@functools.cache
def gradient(program):
    """Loss and gradient of the first batch at random parameters, where no table is at its start."""
    shapes = program.state_shapes().params
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jax.device_put(
            rng.normal(scale=0.5, size=leaf.shape).astype(leaf.dtype), leaf.sharding
        ),
        shapes,
    )
    batch = program.place(batches(1), BATCH)
    with jax.set_mesh(program.mesh):
        run = jax.jit(
            lambda params, batch: program.learner.gradient(
                params, jax.tree.map(lambda x: x[0], batch), KEY
            )
        )
        losses, grads, _ = run(params, batch)
    return float(losses["loss"]), {name: np.asarray(g) for name, g in named(grads).items()}


def assert_same_gradient(actual, exact, atol=1e-5):
    assert actual[0] == pytest.approx(exact[0], rel=1e-6)
    largest = max(np.abs(expected).max() for expected in exact[1].values())
    for name, expected in exact[1].items():
        # Some are 0 but for rounding, as those of a key's bias, which softmax does not see.
        scale = max(np.abs(expected).max(), 1e-2 * largest)
        np.testing.assert_allclose(
            actual[1][name], expected, rtol=0, atol=atol * scale, err_msg=name
        )


@pytest.mark.parametrize(
    "axes",
    [
        axes if name in FAST else pytest.param(axes, marks=pytest.mark.slow)
        for name, axes in MESHES.items()
    ],
)
def test_loss_and_gradients_equal_those_of_one_device(axes):
    assert_same_gradient(gradient(program(mesh_config(axes))), gradient(program(ONE)))


@pytest.mark.slow
@pytest.mark.parametrize("axes", (MESHES | MORE_MESHES).values(), ids=MESHES | MORE_MESHES)
def test_loss_and_gradients_of_a_rich_encoding_equal_those_of_one_device(axes):
    exact = gradient(program(ONE, encoding=RICH))
    assert_same_gradient(gradient(program(mesh_config(axes), encoding=RICH)), exact)


AROUND = {
    "qk_norm": True,
    "output_norm": True,
    "output_gate": True,
    "kv_shift": True,
    "convolution": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {**AROUND, "num_kv_heads": 4},
        {"mixer": "gated_delta"},
        {"mixer": "kda"},
    ],
    ids=["options around attention", "gated_delta", "kda"],
)
def test_other_blocks_on_a_mesh_equal_those_of_one_device(x64, options):
    sizes = {"model_dim": 16, "num_heads": 8, "head_dim": 4, "mlp_dim": 32}
    block = BlockConfig(**sizes, compute_dtype="float64", **options)
    mesh = mesh_config({"data": 2, "fsdp": 2, "tensor": 2})
    with jax.numpy_dtype_promotion("standard"):  # weights of tokens are float32
        exact = gradient(program(ONE, block=block, encoding="learned"))
        actual = gradient(program(mesh, block=block, encoding="learned"))
    assert_same_gradient(actual, exact, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "tensor": 2, "sequence": 2},
        {"fsdp": 4, "tensor": 2},
    ],
    ids=["sequence", "fsdp"],
)
def test_tape_on_a_mesh_equals_one_device(axes):
    changes = {
        "tape": 4,
        "encoding": "none",
        "block": dataclasses.replace(MODEL.block, num_kv_heads=8),
    }
    exact = gradient(program(ONE, **changes))
    # 1e-13 in float64.
    assert_same_gradient(gradient(program(mesh_config(axes), **changes)), exact, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("axes", (MESHES | MORE_MESHES).values(), ids=MESHES | MORE_MESHES)
def test_two_steps_equal_those_of_one_device(axes):
    _, exact = train(program(ONE))
    _, split = train(program(mesh_config(axes)))
    for name in exact:
        np.testing.assert_allclose(split[name], exact[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "attention", "dots"])
def test_recomputing_on_a_mesh_changes_nothing(remat):
    assert_same_gradient(
        gradient(program(mesh_config(MESHES["all but data"]), remat=remat)), gradient(program(ONE))
    )


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2},
        pytest.param(MESHES["all but data"], marks=pytest.mark.slow),
    ],
    ids=["one device", "data and fsdp", "all but data"],
)
def test_microbatches_add_up_to_the_batch(axes):
    assert_same_gradient(gradient(program(mesh_config(axes), accumulate=2)), gradient(program(ONE)))


@pytest.mark.newest
def test_weights_count_by_tokens_not_by_microbatches():
    """A microbatch of fewer tokens has less to say: the mean is that of all tokens."""
    batch = jax.tree.map(lambda x: x[0], batches(1))
    batch["weights"] = batch["weights"] * (np.arange(BATCH) % 2 == 0)[:, None].astype(np.float32)
    batch["weights"][1, -1] = 1  # the second microbatch has one token, the first many

    class Weighed(Learner):
        """Whose loss is a number for each token, so that nothing need be compiled."""

        def metrics(self, params, carry, batch, dropout_key=None):
            weights = batch["weights"]
            total = params["scale"] * jnp.sum(weights * batch["targets"].astype(jnp.float32))
            return {"loss": (total, jnp.sum(weights))}, carry

    fields = {f.name: getattr(learner(), f.name) for f in dataclasses.fields(Learner)}
    whole, halves = (
        Weighed(**fields | {"accumulate": n}).gradient({"scale": jnp.ones(())}, batch, KEY)
        for n in (1, 2)
    )
    mean = (batch["weights"] * batch["targets"]).sum() / batch["weights"].sum()
    for losses, grads, _ in (whole, halves):
        np.testing.assert_allclose([losses["loss"], grads["scale"]], [mean, mean], rtol=1e-6)


@pytest.mark.slow
def test_seeds_side_by_side_share_a_mesh():
    """Each is the run of its seed alone, on one device."""
    alone = program(ONE, encoding="none")
    _, together = train(program(MeshConfig(data=4), width=2, encoding="none"), seeds=(3, 4))
    for row, seed in enumerate((3, 4)):
        _, exact = train(alone, seeds=(seed,))
        for name in exact:
            np.testing.assert_allclose(together[name][row], exact[name], rtol=1e-4, err_msg=name)


@functools.cache
def start(width=1):
    """The program of all axes, and the state that it begins with."""
    made = program(mesh_config(MESHES["all but data"]), width)
    return made, made.init([3, 4][:width])


@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_state_lies_as_state_shapes_says(width):
    made, state = start(width)
    shapes = named(made.state_shapes())
    leaves = named(state)
    assert leaves.keys() == shapes.keys()
    bytes_of = dict.fromkeys(made.mesh.devices.flat, 0)
    for name, leaf in leaves.items():
        shape = shapes[name]
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), name
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim), name
        for shard in leaf.addressable_shards:
            bytes_of[shard.device] += shard.data.size * 8 if name == ".key" else shard.data.nbytes
    assert set(bytes_of.values()) == {bytes_a_device(made.state_shapes())}


@pytest.mark.newest
def test_no_device_ever_has_a_whole_matrix():
    """Neither in the first state, nor while it is made."""
    made, state = start()
    split = {
        name: leaf
        for name, leaf in named((state.params, state.opt_state)).items()
        if name.endswith(("['kernel']", "['embedding']"))
    }
    # Embedding, output, four matrices of attention, three of the MLP; Adam has two of each.
    assert len(split) == 3 * 9
    for name, leaf in split.items():
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size, name
    text = made._init.lower(np.int32(3), {}).compile().as_text()
    made_whole = {leaf.shape for leaf in split.values()} & {
        tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)
    }
    assert not made_whole


def test_initial_parameters_do_not_depend_on_the_mesh():
    assert tiny.contents(start()[1]) == tiny.contents(program(ONE).init([3]))


@pytest.mark.slow
def test_products_in_bfloat16_leave_the_state_in_float32():
    block = dataclasses.replace(MODEL.block, compute_dtype="bfloat16")
    made = program(mesh_config(MESHES["all but data"]), block=block)
    lowered = made.lower(from_config.batch_shapes(TASK, BATCH))
    assert "xbf16>" in lowered.as_text()
    (before, batch), _ = lowered.args_info
    assert batch["inputs"].shape == (1, BATCH, TASK.length("train"))
    after, metrics = lowered.out_info
    types = {leaf.dtype for leaf in jax.tree.leaves((before, after, metrics))}
    assert {t for t in types if jnp.issubdtype(t, jnp.floating)} == {jnp.dtype("float32")}
