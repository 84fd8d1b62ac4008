"""The entry point of attention: `attend` checks a call once, takes the first plan, and runs it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from cope_jax.array_types import Array
from cope_jax.attention import blockwise, full, fused, placement, ring
from cope_jax.attention.checks import turned
from cope_jax.attention.request import Plan, Reason, Request, prepare
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError, first_line
from cope_jax.registry import unknown

RING = "ring"
BACKENDS: dict[str, Callable[[Encoding, Request], Plan | Reason]] = {
    "full": full.plan,
    "blockwise": blockwise.plan,
    "fused": fused.plan,
    RING: ring.plan,
}
# Up to FEW_QUERIES queries or below FEW_PAIRS pairs, "full" takes no longer: see docs/attention.md.
FEW_QUERIES, FEW_PAIRS = 16, 64 * 64


def attend(
    q_BLHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    *,
    encoding: Encoding,
    x: Array | None = None,
    bias: Any = None,
    embedded: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
    q_segment_ids: Array | None = None,
    k_segment_ids: Array | None = None,
    mask: Any = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    sequence_axis: str | None = None,
    batch_axes: Sequence[str] = (),
    head_axis: str | None = None,
    blocks: Sequence[int] | None = None,
) -> Array:
    """Computes multi-head attention with a position encoding, in the layout of
    `jax.nn.dot_product_attention`.

    out_i = Σ_j a_ij v_j,  a_ij = softmax_j(score(q_i·k_j/√K)).

    It calls the encoding's hooks in the order that `cope_jax.encodings.base` documents: `features`,
    `rotate`, `initial_carry`, `score`, `sink`. Logits, gates, sums of gates and softmax are float32
    (float64 for float64 inputs).

    It has reverse mode, forward mode, and forward mode of gradients; only `full` has reverse mode
    of gradients.

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
      x: the input x_BMD of the layer, for the M key tokens. Encodings whose features read it raise
        ConfigError without.
      bias: floating-point numbers that are added to the content logits q·k/√K, `[B, H, L, M]`; B
        and H may be 1. What an encoding computes from content logits, such as CoPE's gates, sees
        them with the bias.
      embedded: True if the model's input went through `encoding.embed`. If False, an encoding that
        acts on the input raises ConfigError, because otherwise this encoding would silently have no
        effect.
      q_positions: integers or real numbers, `[B, L]` or `[1, L]`. If None, positions are M−L …
        M−1, so the last query is at the last key.
      k_positions: integers or real numbers, `[B, M]` or `[1, M]`. If None, positions are 0 … M−1.
      q_segment_ids: `[B, L]` or `[1, L]`. A query sees only keys of its own segment. If None, there
        is one segment. The tokens of a segment should be neighbours: encodings that sum over tokens
        start their sums again after a hole.
      k_segment_ids: `[B, M]` or `[1, M]`. Give both segment ids or neither.
      mask: bool, `[B, 1, L, M]`; any axis may have size 1. True where a query may see a key, unless
        causality, window or segments hide this key. Hidden values must be finite, because their
        weight is 0 and 0·NaN is NaN. A mask takes L·M bytes for each example. For padding and
        documents, segment ids need only L + M numbers.
      causal: hide the keys after each query. "After" refers to the index in the sequence, not to
        the position. The last query is at the last key.
      window: hide the keys that are `window` or more indices away from the query. If None, there is
        no window.
      scale: what multiplies q·k; None means 1/√K.
      logits_soft_cap: c; content logits s, with the bias, become c·tanh(s/c). None means that they
        stay.
      implementation: "full", "blockwise", "fused", "ring" or "auto". "blockwise" needs memory
        linear in the length. "fused" is "blockwise" in kernels for TPUs, CPUs and NVIDIA GPUs.
        "ring" is "blockwise" over several devices. "auto" chooses one of the others; on a GPU never
        "fused", which has not been measured there.
      dropout_rate: share of attention weights that is dropped, if `dropout_key` is given: without a
        key, as in evaluation, none is.
      dropout_key: random key; None means no dropout.
      sequence_axis: the axis of the current mesh (`jax.set_mesh`) that splits the sequence. Give it
        only for "ring".
      batch_axes: axes of the current mesh that split the batch, so that each device computes its
        own examples. If empty, the batch is not split.
      head_axis: the axis of the current mesh that splits the heads. Only kernels need it; XLA
        splits the others.
      blocks: the sizes of a block of queries, a near block of keys and a far block of keys, for
        "blockwise", "ring", and "fused" on TPUs. If None, the sizes are those that are fast on a
        CPU, and in kernels those of the chip.

    Returns:
      out_BLHK, in the type of the values. A query that sees no key gets the value of the encoding's
      sink, or 0 if the encoding has no sink.

    Raises:
      ConfigError: shapes do not fit, the implementation is unknown or cannot run the encoding, or
        "ring" has no current mesh.
    """
    return attend_request(encoding, prepare(**locals()))  # until here, these are the arguments


def attend_request(encoding: Encoding, request: Request) -> Array:
    """Returns out_BLHK of a request, whose examples several devices may split."""
    if request.layout.batch:
        return placement.shard_batch(run, encoding, request)
    return run(encoding, request)


def run(encoding: Encoding, request: Request) -> Array:
    """Runs the first plan that a backend has for the request, and logs once what runs and why not
    what comes before.

    Raises:
      ConfigError: no backend has a plan.
    """
    reasons: list[Reason] = []
    for name in order(request):
        answer = BACKENDS[name](encoding, request)
        if isinstance(answer, Plan):
            placement.log_choice(answer.name, "; ".join(reason.why for reason in reasons))
            try:
                out_BLHK = answer.run()
            except jax.errors.UnexpectedTracerError as error:
                raise ConfigError(
                    f"a hook of {type(encoding).__name__} reads an array of a traced function around it, or an "
                    "argument leaked from one: make the array an nnx.Param of the encoding, or one of the params of "
                    f"flex_attention ({first_line(error)})"
                ) from error
            queries = request.queries
            return turned(encoding, "rotate_back", out_BLHK, queries.features, queries.positions)
        reasons.append(answer)
    why, fix = reasons[-1]
    raise ConfigError(f"implementation={name!r} is not possible, because {why}: {fix}")


def order(request: Request) -> tuple[str, ...]:
    """Returns the names of the backends to ask, the fastest first.

    Raises:
      ConfigError: the implementation is unknown, or does not fit the axis of the sequence.
    """
    name, axis = request.implementation, request.layout.length
    if name not in (*BACKENDS, "auto"):
        raise unknown("attention implementation", name, [*BACKENDS, "auto"])
    if name != "auto" and (axis is None) == (name == RING):
        raise ConfigError(
            f"implementation={name!r} does not fit sequence_axis={axis!r}: give sequence_axis for 'ring' and omit "
            "sequence_axis for the others"
        )
    return automatic(request.length, len(request.keys.indices), axis) if name == "auto" else (name,)


def automatic(length: int, keys: int, sequence_axis: str | None = None) -> tuple[str, ...]:
    """Returns the backends that `implementation="auto"` asks, in their order.

    >>> automatic(1, 4096), automatic(4096, 4096)[-2:], automatic(4096, 4096, "sequence")
    (('full',), ('blockwise', 'full'), ('ring',))
    """
    if sequence_axis is not None:
        return (RING,)
    if length <= FEW_QUERIES or length * keys < FEW_PAIRS:
        return ("full",)
    kernels = ("fused",) if placement.current_device() in fused.FASTER else ()
    return (*kernels, "blockwise", "full")
