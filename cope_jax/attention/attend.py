"""The entry point of attention, with several implementations, independent of the encoding."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.blockwise import blockwise_attention
from cope_jax.attention.full import full_attention
from cope_jax.attention.inputs import Inputs, prepare
from cope_jax.attention.ring import ring_attention
from cope_jax.attention.tiles import BlockSizes
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {"full": full_attention, "blockwise": blockwise_attention}
RING = "ring"
# Up to FEW_QUERIES queries or below FEW_PAIRS pairs, "full" takes no longer: see docs/attention.md.
FEW_QUERIES, FEW_PAIRS = 16, 64 * 64


def choose(q_BLHK: Array, k_BMGK: Array, sequence_axis: str | None = None) -> str:
    """The implementation that `implementation="auto"` chooses.

    >>> import jax
    >>> short, long = (jax.ShapeDtypeStruct((1, length, 8, 64), "float32") for length in (1, 4096))
    >>> choose(short, long), choose(long, long), choose(long, long, "sequence")
    ('full', 'blockwise', 'ring')
    """
    if sequence_axis is not None:
        return RING
    length, keys = q_BLHK.shape[1], k_BMGK.shape[1]
    return "full" if length <= FEW_QUERIES or length * keys < FEW_PAIRS else "blockwise"


def attend(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    *,
    encoding: Encoding,
    features: PyTree | None = None,
    embedded: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
    q_segment_ids: Array | None = None,
    k_segment_ids: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    sequence_axis: str | None = None,
    batch_axes: Sequence[str] = (),
    blocks: Sequence[int] | None = None,
) -> Array:
    """Multi-head attention with a position encoding, in the layout of `jax.nn.dot_product_attention`.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)).

    The encoding's hooks are called in the order that `cope_jax.encodings.base` documents: `features` (unless they are
    given), `rotate`, `initial_carry`, `score`, `sink`. Logits, positions and softmax are float32 whatever the inputs'
    type.

    >>> import jax
    >>> from flax import nnx
    >>> from cope_jax import encodings
    >>> encoding = encodings.create("cope", num_heads=2, head_dim=8, npos_max=16, rngs=nnx.Rngs(0))
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    >>> attend(q, k, v, encoding=encoding).shape
    (1, 5, 2, 8)

    Args:
      q_BLHK: queries.
      k_BMGK: keys; G divides H (grouped-query attention).
      v_BMGK: values.
      encoding: the position encoding.
      features: the encoding's features of the M tokens, the last L of which are the queries'; None calls
        `encoding.features(None, q, k, v, None)`.
      embedded: whether the model's input went through `encoding.embed`. Without it, an encoding that acts only there
        would silently have no effect.
      q_positions: int32 `[B, L]` or `[1, L]`; None: consecutive, the last query at the last key.
      k_positions: int32 `[B, M]` or `[1, M]`; None: 0 … M−1.
      q_segment_ids: `[B, L]`: tokens meet only within one segment.
      k_segment_ids: `[B, M]`.
      causal: hide the keys after each query. "After" refers to the index in the sequence, not to the position; the last
        query is at the last key.
      window: hide the keys that are `window` or more indices away.
      implementation: "full", "blockwise" (memory linear in the length), "ring" (blockwise over several devices), or
        "auto", which chooses among them.
      dropout_rate: share of attention weights that is dropped, if a key is given.
      dropout_key: random key; None means no dropout.
      sequence_axis: for "ring": the axis, of the mesh of `jax.set_mesh`, over which the sequence is split.
      batch_axes: axes of that mesh over which the batch is split: each device attends for its own examples.
      blocks: for "blockwise" and "ring": the sizes of a block of queries, a near block of keys and a far block of keys;
        None: sizes that are fast on a CPU.

    Returns:
      out_BLHK, in the type of the values; for a query that sees no key, 0 or the sink's value.

    Raises:
      ConfigError: shapes that do not fit, an unknown implementation, a ring without its mesh, or an encoding that the
        implementation cannot run.
    """
    name = choose(q_BLHK, k_BMGK, sequence_axis) if implementation == "auto" else implementation
    if name == "blockwise" and implementation == "auto" and not encoding.splits_queries:
        name = "full"
    if name not in (*IMPLEMENTATIONS, RING):
        raise unknown("attention implementation", implementation, [*IMPLEMENTATIONS, RING, "auto"])
    if (sequence_axis is None) == (name == RING):
        raise ConfigError(
            f"implementation={name!r}, sequence_axis={sequence_axis!r}: give sequence_axis for 'ring' and only for it"
        )
    if name != "full" and not encoding.splits_queries:
        raise ConfigError(f"implementation={name!r} splits the queries, but this encoding couples them: choose 'full'")
    inputs = prepare(
        q_BLHK,
        k_BMGK,
        v_BMGK,
        encoding=encoding,
        features=features,
        embedded=embedded,
        q_positions=q_positions,
        k_positions=k_positions,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        causal=causal,
        window=window,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    if blocks is not None and (len(blocks) != 3 or min(blocks) < 1):
        raise ConfigError(f"blocks must be three sizes of at least 1, got {tuple(blocks)}")
    options: dict[str, Any] = {} if blocks is None or name == "full" else {"blocks": BlockSizes(*blocks)}
    if sequence_axis is not None:
        options["axis"] = sequence_axis
    attention = functools.partial(ring_attention if name == RING else IMPLEMENTATIONS[name], **options)
    return shard_batch(attention, encoding, inputs, batch_axes) if batch_axes else attention(encoding, inputs)


def shard_batch(
    attention: Callable[[Encoding, Inputs], Array], encoding: Encoding, inputs: Inputs, axes: Sequence[str]
) -> Array:
    """The same as `attention(encoding, inputs)`, each device attending for its share of the examples.

    Examples do not depend on each other, but the compiler cannot always find that out. Then it gathers, or sums over
    all devices, for example for a scatter into rows of many examples.

    Raises:
      ConfigError: no mesh with these axes, or a batch that they do not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for axis in axes:
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
    batch, devices = inputs.q.shape[0], math.prod(mesh.shape[axis] for axis in axes)
    if batch % devices:
        raise ConfigError(f"a batch of {batch} cannot be split over {' × '.join(axes)} = {devices} devices")
    graph, params = nnx.split(encoding)
    examples, everyone = PartitionSpec(tuple(axes)), PartitionSpec()

    def spec(x: Any) -> PartitionSpec:
        return examples if x.shape[0] == batch and batch > 1 else everyone

    # Indices are the same for all examples, and stay NumPy where they are known while tracing.
    arrays = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name not in ("mask", "drop")}
    segments = inputs.mask.q_segment_ids_BL, inputs.mask.k_segment_ids_BM
    arrays, segments = jax.tree.map(jnp.asarray, (arrays, segments))

    def on_device(params: Any, arrays: dict[str, Any], segments: Any, drop: Any) -> Array:
        mask = dataclasses.replace(inputs.mask, q_segment_ids_BL=segments[0], k_segment_ids_BM=segments[1])
        return attention(nnx.merge(graph, params), Inputs(**arrays, mask=mask, drop=drop))

    split = jax.shard_map(
        on_device,
        in_specs=(everyone, *jax.tree.map(spec, (arrays, segments)), PartitionSpec(None, tuple(axes))),
        out_specs=examples,
        axis_names=set(axes),
        check_vma=False,
    )
    # Compiled, because a partly manual program cannot run op by op.
    return jax.jit(split)(jax.tree.map(jnp.asarray, params), arrays, segments, inputs.drop)
