"""Ring attention says what one device says, moves keys from neighbour to neighbour, and shares
causal work evenly.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cope_jax import encodings
from cope_jax.attention import BlockSizes, attend, full_attention, placement, prepare, ring
from cope_jax.attention.blockwise import blockwise_attention
from cope_jax.attention.ring_chunk import chunk_sizes
from cope_jax.attention.ring_schedule import Ring
from cope_jax.encodings import AttentionShape, Carry, Encoding
from cope_jax.encodings.base import NoOptions
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from tests.attention.problems import (
    arrays_of,
    assert_equal,
    in_blocks,
    plain,
    ran,
    value_and_gradients,
)
from tests.encodings.cases import BATCH, CASES, SIZES, build, goes_around
from tests.models import cases as models

AXIS = "sequence"
pytestmark = pytest.mark.xdist_group("ring")


def mesh_of(devices, data=1, types=(AxisType.Auto, AxisType.Auto)):
    shape = (data, devices // data)
    return jax.make_mesh(shape, ("data", AXIS), axis_types=types, devices=jax.devices()[:devices])


def around(*blocks, heads=None, **kernels):
    """Ring attention with these blocks."""

    def run(encoding, request):
        layout = Layout(request.layout.batch, AXIS, heads)
        return ran(ring.plan(encoding, dataclasses.replace(request, layout=layout), **kernels))

    return in_blocks(blocks, run)


@pytest.mark.parametrize("spec", ["path", "wall"])
def test_a_state_cannot_go_around(spec):
    graphdef, state = build(spec)
    x = {name: jnp.asarray(array) for name, array in arrays_of(16, 16).items()}
    encoding = nnx.merge(graphdef, state)
    request = prepare(x["q"], x["k"], x["v"], encoding=encoding, x=x["x"])
    with jax.set_mesh(mesh_of(2)):
        answer = ring.plan(encoding, dataclasses.replace(request, layout=Layout((), AXIS, None)))
    assert "splits the keys, but this encoding cannot" in answer.why


def test_without_kernels_nothing_is_resident():
    encoding = encodings.create("alibi", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 16, 2, 4))
    with (
        jax.set_mesh(mesh_of(2)),
        pytest.raises(ConfigError, match="resident is for kernels of TPUs, and this device"),
    ):
        around(2, 2, 4, resident=2)(encoding, prepare(x, x, x, encoding=encoding))


@pytest.mark.slow
def test_with_kernels_and_heads_and_batch_over_other_axes(x64):
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", AXIS), axis_types=(AxisType.Auto,) * 3)
    graphdef, state = build("cope(npos_max=3)")
    arrays, data = arrays_of(13, 13), plain(13, 13)

    def split(encoding, request):
        kernels = around(2, 2, 4, heads="tensor", resident=2, interpret=True)
        request = dataclasses.replace(request, layout=Layout(batch=("data",)))
        return placement.shard_batch(kernels, encoding, request)

    with jax.set_mesh(mesh):
        computed = jax.jit(lambda *data: value_and_gradients(split, graphdef, *data))(
            state, arrays, data
        )
    assert_equal(
        computed,
        jax.jit(lambda *data: value_and_gradients(full_attention, graphdef, *data))(
            state, arrays, data
        ),
    )


def test_blocks_divide_a_chunk_that_is_hardly_longer_than_its_share():
    x = jax.ShapeDtypeStruct((1, 1, 1, 128), jnp.bfloat16)
    for blocks in (BlockSizes(512, 512, 512), BlockSizes(128, 128, 512)):
        for share in (100, 400, 490, 563, 1024, 20_000):
            size, sizes, parts = chunk_sizes(share, blocks, x, x)
            assert parts == -(-share // 8192)
            assert share <= size < share + 128 * parts
            assert size % sizes.queries == size % (parts * sizes.near) == sizes.queries % 128 == 0
            assert size // parts <= 8192
    assert chunk_sizes(1024, BlockSizes(512, 512, 512), x, x) == (
        1024,
        BlockSizes(512, 512, 512),
        1,
    )
    assert chunk_sizes(20_000, BlockSizes(128, 128, 512), x, x, resident=4096)[2] == 5


BLOCKS = around(2, 1, 2)


@pytest.mark.parametrize(
    "devices, spec, length, options",
    [
        pytest.param(8, "cope(npos_max=3)", 37, {}, marks=pytest.mark.slow),
        (4, "cope(npos_max=4,gate=value)+rope", 21, {"dropout_rate": 0.3}),
        pytest.param(4, "fox", 13, {}, marks=pytest.mark.slow),
        pytest.param(2, "rope", 13, {"causal": False, "window": 4}, marks=pytest.mark.slow),
        pytest.param(4, "alibi", 12, {"window": 6}, marks=pytest.mark.slow),
        pytest.param(1, "cope(position=slope,gate=separate_key)", 9, {}, marks=pytest.mark.slow),
        pytest.param(8, "none", 5, {}, marks=pytest.mark.slow),
    ],
)
def test_it_equals_one_device(devices, spec, length, options, x64):
    """In value and every gradient: lengths that do not divide, several strips and blocks, segments,
    grouped heads.
    """
    assert_equals_one_device(devices, spec, length, **options)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in CASES if goes_around(spec)])
def test_every_encoding_equals_one_device(spec, x64):
    assert_equals_one_device(4, spec, 11)


@pytest.mark.parametrize(
    "devices, spec, length, options",
    [
        pytest.param(2, "cope(npos_max=3)", 13, {}, marks=pytest.mark.slow),
        pytest.param(4, "fox", 29, {"dropout_rate": 0.3}, marks=pytest.mark.slow),
        pytest.param(2, "rope", 13, {"causal": False, "window": 4}, marks=pytest.mark.slow),
    ],
)
def test_with_kernels_it_equals_one_device(devices, spec, length, options, x64):
    """Parts of the keys of a chunk are in fast memory, one after the other."""
    kernels = around(2, 2, 4, resident=2, interpret=True)
    assert_equals_one_device(devices, spec, length, kernels, **options)


def test_real_positions(x64):
    assert_equals_one_device(2, "alibi", 13, step=0.7)


def assert_equals_one_device(devices, spec, length, attention=BLOCKS, step=1, **options):
    graphdef, state = build(spec)
    once, split = (
        jax.jit(lambda *data, how=how: value_and_gradients(how, graphdef, *data, **options))
        for how in (full_attention, attention)
    )
    rng = np.random.default_rng(0)
    single, mixed = (
        np.zeros((BATCH, length), np.int32),
        rng.integers(0, 3, (BATCH, length), dtype=np.int32),
    )
    for seed, segments in enumerate([single, np.sort(mixed), mixed]):
        arrays, data = arrays_of(length, length, seed), plain(length, length)
        positions = step * (data.q_positions // 2 + 3)  # not the places
        data = data._replace(
            q_positions=positions, k_positions=positions, q_segments=segments, k_segments=segments
        )
        data = data._replace(
            dropout_key=jax.random.key(seed) if "dropout_rate" in options else None
        )
        with jax.set_mesh(mesh_of(devices)):
            computed = split(state, arrays, data)
        assert_equal(computed, once(state, arrays, data))


@functools.cache
def on_eight_devices():
    """A ring of four under two shares of the batch, compiled: its text, its result, a function that
    gives that of one device, and the sharding.
    """
    graphdef, state = build("cope(npos_max=3,gate=value)+rope", dtype=np.float32)
    arrays = arrays_of(32, 32, dtype=np.float32)

    def run(how, state, arrays):
        return value_and_gradients(how, graphdef, state, arrays, plain(32, 32))

    exact = functools.partial(jax.jit(functools.partial(run, blockwise_attention)), state, arrays)
    mesh = mesh_of(8, data=2)
    split = NamedSharding(mesh, PartitionSpec("data", AXIS))
    arrays = {name: jax.device_put(array, split) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(run, around(4, 2, 4))).lower(state, arrays).compile()
        return compiled.as_text(), compiled(state, arrays), exact, split


@pytest.mark.slow
def test_float32():
    _, computed, exact, _ = on_eight_devices()
    assert_equal(computed, exact(), 1e-6)


def test_keys_move_between_neighbours_and_are_never_gathered():
    text, (out, (_, inputs)), _, split = on_eight_devices()
    moved = re.findall(r"= f32\[([\d,]*)\].* collective-permute(?:-start)?\(", text)
    sizes = {math.prod(map(int, shape.split(","))) for shape in moved}
    chunk = 4 * SIZES.head_dim  # of one head
    assert sizes == {SIZES.kv_heads * chunk, SIZES.heads * chunk}, (
        "chunks of keys, and of queries to their devices"
    )
    gathered = [
        line
        for line in text.splitlines()
        if re.search(r" (all-gather|all-to-all)(-start)?\(", line)
    ]
    # XLA gathers what CoPE scatters over the shares of the batch: groups of 2 devices, and no axis
    # of the ring.
    assert all("replica_groups=[4,2]<=[2,4]T(1,0)" in line for line in gathered), gathered
    for array in (out, inputs["q"], inputs["k"], inputs["v"]):
        assert array.sharding.is_equivalent_to(split, array.ndim)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_schedule(devices):
    """Every chunk is on its device, sees the chunks from its own to the first, and comes home; the
    work is even.
    """
    chunks = 2 * devices

    @jax.jit
    def schedule(chunk):
        ring = Ring.of(AXIS)

        def on_device(ring, natural):
            placed = ring.placed(natural)
            home, seen = jax.lax.scan(
                lambda keys, _: (ring.moved(keys), keys), placed, length=chunks
            )
            return placed, seen[None], ring.unplaced(home)

        return ring.sharded(on_device, (True,), (True, True, True))(chunk)

    with jax.set_mesh(mesh_of(devices)):
        placed, seen, home = schedule(np.arange(chunks, dtype=np.int32))
    np.testing.assert_array_equal(home, np.arange(chunks))
    assert sorted(placed.tolist()) == list(range(chunks))
    for device, pair, steps in zip(
        range(devices), placed.reshape(devices, 2).tolist(), seen.tolist(), strict=True
    ):
        orders = [list(order) for order in zip(*steps, strict=True)]
        assert orders == [[(chunk - step) % chunks for step in range(chunks)] for chunk in pair]
        visible = [
            [other for other in order if other <= chunk]
            for chunk, order in zip(pair, orders, strict=True)
        ]
        assert visible == [list(range(chunk, -1, -1)) for chunk in pair], "nearest first"
        assert sum(map(len, visible)) == 2 * devices + 1
        assert [Ring(AXIS, devices).device_of(chunk) for chunk in pair] == [device] * 2


class Probe(Encoding):
    """Tells which blocks are scored."""

    def score(self, pairs, carry):
        jax.debug.callback(self.seen, pairs.q_positions[0, 0], pairs.k_positions[0, -1])
        return pairs.logits, carry

    @staticmethod
    def seen(query, key):
        VISITED[int(query) // CHUNK, int(key) // CHUNK] += 1


VISITED, CHUNK = collections.Counter(), 4


def test_hidden_chunks_are_not_computed():
    VISITED.clear()
    encoding = Probe(NoOptions(), AttentionShape(1, 4), rngs=nnx.Rngs(0))
    x = jnp.ones((1, 8 * CHUNK, 1, 4))
    with jax.set_mesh(mesh_of(4)):
        jax.block_until_ready(around(CHUNK, 2, 2)(encoding, prepare(x, x, x, encoding=encoding)))
    jax.effects_barrier()
    assert VISITED == {(query, key): 2 for query in range(8) for key in range(query + 1)}


@pytest.mark.parametrize(
    "forms",
    [
        pytest.param({}, id="equal layers"),
        pytest.param({"window": 5}, id="one without a window"),
    ],
)
@pytest.mark.slow
def test_a_decoder_trains_as_on_one_device(forms):
    """Loss and the gradient of every parameter, with packed segments, dropout, tables and
    recomputed layers.
    """
    tokens = models.tokens(length=12)
    segments = np.array([[0] * 3 + [1] * 9, [0] * 5 + [2] * 7], np.int32)

    def loss_and_gradients(attention, layout=WHOLE):
        block, options = (
            {"dropout": 0.2, "attention": attention, **forms},
            {"max_length": 12, "remat": "full", "full_layers": (1,) if forms else None},
        )
        graphdef, state = models.build(
            models.config("learned+cope(npos_max=4)", block, layout=layout, **options)
        )

        def loss(state):
            logits = nnx.merge(graphdef, state)(
                tokens, segment_ids_BL=segments, dropout_key=jax.random.key(0)
            )
            return -jnp.take_along_axis(
                jax.nn.log_softmax(logits), tokens[..., None], axis=-1
            ).mean()

        return jax.jit(jax.value_and_grad(loss))(state)

    exact_loss, exact = loss_and_gradients("full")
    with jax.set_mesh(mesh_of(8, data=2)):
        loss, gradients = loss_and_gradients("ring", Layout(length=AXIS))
    np.testing.assert_allclose(loss, exact_loss, rtol=models.ROUNDING)
    computed, exact = models.named(gradients), models.named(exact)
    for name, gradient in exact.items():
        np.testing.assert_allclose(
            computed[name], gradient, rtol=0, atol=models.ROUNDING, err_msg=name
        )


@pytest.mark.parametrize("lengths", [None, np.array([3, 6])], ids=["whole", "ragged"])
def test_prompts_are_read_around_the_ring(lengths):
    config = models.config(block={"attention": "ring"}, layout=Layout(length=AXIS))
    graphdef, state = models.abstract(config)
    read = functools.partial(
        jax.eval_shape,
        lambda state: nnx.merge(graphdef, state).prefill(models.tokens(), 9, lengths_B=lengths),
    )
    with jax.set_mesh(mesh_of(8)):
        assert read(state)[0].shape == (2, models.VOCAB)
    with pytest.raises(ConfigError, match="needs a mesh"):
        read(state)


def test_a_sequence_that_no_devices_share_needs_no_ring():
    graphdef, state = models.abstract(models.config(block={"attention": "ring"}))
    logits = jax.eval_shape(lambda state: nnx.merge(graphdef, state)(models.tokens()), state)
    assert logits.shape[-1] == models.VOCAB


def test_nothing_gives_nothing():
    encoding = encodings.create("cope", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    q, k = jnp.ones((2, 0, 4, 4)), jnp.ones((2, 0, 2, 4))
    with jax.set_mesh(mesh_of(8)):
        assert attend(q, k, k, encoding=encoding, sequence_axis=AXIS).shape == q.shape


def test_a_length_that_the_devices_do_not_divide_is_left_whole():
    """XLA, left alone, splits it, and gets the gradient of an embedding wrong."""
    encoding = nnx.merge(*build("none", dtype=np.float32))
    table = np.random.default_rng(0).normal(size=(11, 2, 4, 4)).astype(np.float32)
    tokens = models.tokens(length=7)

    def gradient(**options):
        def loss(table):
            x = table[tokens]
            q, k, v = x[:, :, 0], x[:, :, 1, :2], x[:, :, 1, 2:]
            return jnp.square(q + attend(q, k, v, encoding=encoding, **options)).sum()

        return jax.jit(jax.grad(loss))(table)

    with jax.set_mesh(mesh_of(8, data=2)):
        computed = gradient(implementation="ring", sequence_axis=AXIS)
    np.testing.assert_allclose(computed, gradient(implementation="full"), rtol=0, atol=1e-5)


def test_types_are_kept():
    encoding = encodings.create(
        "cope+rope", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0)
    )
    q = jax.ShapeDtypeStruct((2, 6, 4, 4), jnp.bfloat16)
    k = v = jax.ShapeDtypeStruct((2, 6, 2, 4), jnp.bfloat16)
    with jax.set_mesh(mesh_of(8)):
        out, gradients = jax.eval_shape(
            lambda *qkv: (lambda out, pull: (out, pull(out)))(
                *jax.vjp(lambda *qkv: attend(*qkv, encoding=encoding, sequence_axis=AXIS), *qkv)
            ),
            *(q, k, v),
        )
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


class Product(Encoding):
    """A carry that is no sum: its logits are multiplied by it."""

    def initial_carry(self, q_BHLK, q_features):
        return Carry(state=jnp.ones(q_BHLK.shape[:3], q_BHLK.dtype))

    def score(self, pairs, carry):
        return pairs.logits * carry.state[..., None], Carry(state=carry.state * 0.5)


MISTAKES = {
    "no axis": (
        {"implementation": "ring"},
        "give sequence_axis for 'ring' and omit sequence_axis for the others",
    ),
    "another implementation": (
        {"implementation": "full", "sequence_axis": AXIS},
        "give sequence_axis for 'ring'",
    ),
    "axis": (
        {"sequence_axis": "sequences"},
        "unknown axis of the mesh 'sequences': did you mean 'sequence'",
    ),
    "not causal": ({"sequence_axis": AXIS, "causal": False}, "must be causal"),
    "mask": (
        {"sequence_axis": AXIS, "mask": jnp.ones((1, 1, 6, 6), bool)},
        "because it takes no mask: use causal, window",
    ),
    "carry": ({"sequence_axis": AXIS, "encoding": Product}, "but this encoding cannot"),
    "lengths": (
        {"sequence_axis": AXIS, "q": jnp.ones((2, 3, 4, 4))},
        "as many queries as keys, got 3 and 6",
    ),
    "type of axis": (
        {"sequence_axis": AXIS, "types": (AxisType.Explicit,) * 2},
        "must be of type Auto",
    ),
    "no mesh": ({"sequence_axis": AXIS, "types": None}, "call under jax.set_mesh(mesh)"),
}


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    shape = AttentionShape(SIZES.heads, SIZES.head_dim, SIZES.kv_heads)
    encoding = encodings.create("cope", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    k = jnp.ones((2, 6, 2, 4))
    arguments = {
        "q": jnp.ones((2, 6, 4, 4)),
        "encoding": encoding,
        "types": (AxisType.Auto,) * 2,
    } | change
    if arguments["encoding"] is Product:
        arguments["encoding"] = Product(NoOptions(), shape, rngs=nnx.Rngs(0))
    q, types = arguments.pop("q"), arguments.pop("types")
    with pytest.raises(ConfigError) as error:
        if types is None:
            attend(q, k, k, **arguments)
        else:
            with jax.set_mesh(mesh_of(8, types=types)):
                attend(q, k, k, **arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
