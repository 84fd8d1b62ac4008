"""The entry point of attention: `attend` chooses an implementation and works with every encoding."""

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
from cope_jax.attention import fused, placement
from cope_jax.attention.blockwise import blockwise_attention
from cope_jax.attention.full import full_attention
from cope_jax.attention.fused import fused_attention
from cope_jax.attention.inputs import Inputs, prepare
from cope_jax.attention.ring import ring_attention
from cope_jax.attention.tiles import BlockSizes
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import checked, unknown

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "full": full_attention,
    "blockwise": blockwise_attention,
    "fused": fused_attention,
}
RING = "ring"
# Up to FEW_QUERIES queries or below FEW_PAIRS pairs, "full" takes no longer: see docs/attention.md.
FEW_QUERIES, FEW_PAIRS = 16, 64 * 64


def choose(q_BLHK: Array, k_BMGK: Array, sequence_axis: str | None = None) -> str:
    """Returns the name of the implementation that `implementation="auto"` chooses.

    If the fused kernels cannot run, `attend` replaces "fused" by "blockwise". If the encoding couples the queries, it
    replaces both by "full".

    >>> import jax
    >>> short, long = (jax.ShapeDtypeStruct((1, length, 8, 64), "float32") for length in (1, 4096))
    >>> choose(short, long), choose(long, long), choose(long, long, "sequence")
    ('full', 'fused', 'ring')
    """
    if sequence_axis is not None:
        return RING
    length, keys = q_BLHK.shape[1], k_BMGK.shape[1]
    if length <= FEW_QUERIES or length * keys < FEW_PAIRS:
        return "full"
    return "fused" if placement.current_device() in fused.FASTER else "blockwise"


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
    mask: Any = None,
    causal: bool = True,
    window: int | None = None,
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    sequence_axis: str | None = None,
    batch_axes: Sequence[str] = (),
    head_axis: str | None = None,
    blocks: Sequence[int] | None = None,
) -> Array:
    """Computes multi-head attention with a position encoding, in the layout of `jax.nn.dot_product_attention`.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)).

    It calls the encoding's hooks in the order that `cope_jax.encodings.base` documents: `features`, `rotate`,
    `initial_carry`, `score`, `sink`. If features are given, it does not call `features`. Logits, gates, sums of gates
    and softmax are float32 (float64 for float64 inputs).

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
      features: the encoding's features of the M key tokens. The last L of these are also the query tokens. If None,
        `attend` computes them without the layer's input x. With x, pass `encoding.features(Tokens(x, q, k, v,
        k_positions, k_segment_ids), None)[0]`.
      embedded: True if the model's input went through `encoding.embed`. If False, an encoding that acts on the input
        raises ConfigError, because otherwise this encoding would silently have no effect.
      q_positions: int32 `[B, L]` or `[1, L]`. If None, positions are M−L … M−1, so the last query is at the last key.
      k_positions: int32 `[B, M]` or `[1, M]`. If None, positions are 0 … M−1.
      q_segment_ids: `[B, L]` or `[1, L]`. A query sees only keys of its own segment. If None, there is one segment.
      k_segment_ids: `[B, M]` or `[1, M]`. Give both segment ids or neither.
      mask: bool, `[B, 1, L, M]`; any axis may have size 1. True where a query may see a key, unless causality, window
        or segments hide this key. Hidden values must be finite, because their weight is 0 and 0·NaN is NaN. A mask
        takes L·M bytes for each example. For padding and documents, segment ids need only L + M numbers.
      causal: hide the keys after each query. "After" refers to the index in the sequence, not to the position. The last
        query is at the last key.
      window: hide the keys that are `window` or more indices away from the query. If None, there is no window.
      implementation: "full", "blockwise", "fused", "ring" or "auto". "blockwise" needs memory linear in the length.
        "fused" is "blockwise" in kernels for TPUs, CPUs and NVIDIA GPUs. "ring" is "blockwise" over several devices.
        "auto" chooses one of the others; on a GPU never "fused", which has not been measured there.
      dropout_rate: share of attention weights that is dropped, if `dropout_key` is given.
      dropout_key: random key; None means no dropout.
      sequence_axis: the axis of the current mesh (`jax.set_mesh`) that splits the sequence. Give it only for "ring".
      batch_axes: axes of the current mesh that split the batch, so that each device computes its own examples. If
        empty, the batch is not split.
      head_axis: the axis of the current mesh that splits the heads. Only kernels need it; XLA splits the others.
      blocks: the sizes of a block of queries, a near block of keys and a far block of keys, for "blockwise", "ring",
        and "fused" on TPUs. If None, the sizes are those that are fast on a CPU, and in kernels those of the chip.

    Returns:
      out_BLHK, in the type of the values. A query that sees no key gets the value of the encoding's sink, or 0 if the
      encoding has no sink.

    Raises:
      ConfigError: shapes do not fit, the implementation is unknown or cannot run the encoding, or "ring" has no current
        mesh.
    """
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
        mask=mask,
        causal=causal,
        window=window,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    for name, axis in (("sequence_axis", sequence_axis), ("head_axis", head_axis)):
        checked(axis, str | None, name)
    batch_axes = checked(batch_axes, tuple[str, ...], "batch_axes")
    checked(implementation, str, "implementation")
    name = choose(q_BLHK, k_BMGK, sequence_axis) if implementation == "auto" else implementation
    if name in ("blockwise", "fused") and implementation == "auto" and not encoding.traits.splits_queries:
        name = "full"
    if name == "full" and not k_BMGK.shape[1] and encoding.traits.splits_queries:
        name = "blockwise"  # it visits no block; the hooks of encodings may need a key
    if name not in (*IMPLEMENTATIONS, RING):
        raise unknown("attention implementation", implementation, [*IMPLEMENTATIONS, RING, "auto"])
    if (sequence_axis is None) == (name == RING):
        raise ConfigError(
            f"implementation={name!r} does not fit sequence_axis={sequence_axis!r}: give sequence_axis for 'ring' and "
            "omit sequence_axis for the others"
        )
    if name != "full" and not encoding.traits.splits_queries:
        raise ConfigError(f"implementation={name!r} splits the queries, but this encoding couples them: choose 'full'")
    blocks = checked(blocks, tuple[int, ...] | None, "blocks")
    if blocks is not None and (len(blocks) != 3 or min(blocks) < 1):
        raise ConfigError(f"blocks must be three sizes of at least 1, got {blocks}")
    sizes = None if blocks is None else BlockSizes(*blocks)
    if name == "fused" and implementation == "auto":
        reason = fused.why_not(encoding, inputs, sizes, batch_axes=batch_axes, head_axis=head_axis)
        name = "fused" if reason is None else "blockwise"
        placement.log_choice(name, reason)
    options: dict[str, Any] = {} if sizes is None or name == "full" else {"blocks": sizes}
    if sequence_axis is not None:
        options["axis"] = sequence_axis
    if name in ("fused", RING):
        options["head_axis"] = head_axis
    attention = functools.partial(ring_attention if name == RING else IMPLEMENTATIONS[name], **options)
    return shard_batch(attention, encoding, inputs, batch_axes) if batch_axes else attention(encoding, inputs)


def shard_batch(
    attention: Callable[[Encoding, Inputs], Array], encoding: Encoding, inputs: Inputs, axes: Sequence[str]
) -> Array:
    """Splits the batch over devices, and computes `attention(encoding, inputs)` on each device for its own examples.

    Examples are independent of each other, but the compiler cannot always infer this. Without this function, the
    compiler would then gather or sum over all devices, for example for a scatter into rows of many examples.

    Raises:
      ConfigError: the current mesh does not have these axes, or they do not split the batch evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for axis in axes:
        if axis not in mesh.axis_names:
            raise unknown("axis of the mesh", axis, mesh.axis_names)
    batch, devices = inputs.q.shape[0], math.prod(mesh.shape[axis] for axis in axes)
    if batch % devices:
        raise ConfigError(
            f"a batch of {batch} cannot be split over {' × '.join(axes)} = {devices} devices: use a batch size that "
            f"is a multiple of {devices}"
        )
    graph, params = nnx.split(encoding)
    examples, everyone = PartitionSpec(tuple(axes)), PartitionSpec()

    def spec(x: Any) -> PartitionSpec:
        return examples if x.shape[0] == batch and batch > 1 else everyone

    # Indices are the same for all examples, and stay NumPy where they are known while tracing.
    arrays = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if f.name not in ("mask", "drop")}
    by_example = "q_segment_ids_BL", "k_segment_ids_BM", "given_B1LM"
    masks = tuple(getattr(inputs.mask, name) for name in by_example)
    arrays, masks = jax.tree.map(jnp.asarray, (arrays, masks))

    def on_device(params: Any, arrays: dict[str, Any], masks: Any, drop: Any) -> Array:
        mask = dataclasses.replace(inputs.mask, **dict(zip(by_example, masks, strict=True)))
        return attention(nnx.merge(graph, params), Inputs(**arrays, mask=mask, drop=drop))

    split = jax.shard_map(
        on_device,
        in_specs=(everyone, *jax.tree.map(spec, (arrays, masks)), PartitionSpec(None, tuple(axes))),
        out_specs=examples,
        axis_names=set(axes),
        check_vma=False,
    )
    # Compiled, because a partly manual program cannot run op by op.
    return jax.jit(split)(jax.tree.map(jnp.asarray, params), arrays, masks, inputs.drop)
