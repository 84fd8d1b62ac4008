"""Attention by the two kernels of `tile_flash`, and its derivative, on any backend."""

import dataclasses
import functools
import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array
from cope_jax.attention import (
    blockwise,
    derivative,
    placement,
    streaming_gradient,
    streaming_softmax,
)
from cope_jax.attention.blocks import BlockSizes, along_sequence, pad_by
from cope_jax.attention.derivative import RESIDUALS, Passes
from cope_jax.attention.kernels.tile import tile_flash, tile_strip
from cope_jax.attention.kernels.tile.tile_plan import Execution
from cope_jax.attention.kernels.tile.tile_values import NotATile
from cope_jax.attention.request import Request
from cope_jax.attention.stream import Stream, needs_one_block, stream_of
from cope_jax.attention.streaming_gradient import KeyGradients, Residuals
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError, first_line


def why_not(encoding: Encoding, request: Request) -> str | None:
    """Returns why kernels that are printed as text cannot run a request; None if they may."""
    axis = request.layout.width
    if why := why_no_kernels(encoding, request):
        return why
    if request.blocks is not None:
        return "sizes of blocks are given, and the kernels of this device have their own"
    if axis is not None and jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1:
        return f"axis {axis!r} of the mesh splits the heads, and the kernels of this device cannot"
    return placement.why_undivided(request.layout.batch, None, 1)


def why_no_kernels(encoding: Encoding, request: Request) -> str | None:
    """Returns why no kernels, for any device, can run a request; None if they may."""
    queries, keys = request.queries, request.keys
    if not encoding.traits.splits_queries or needs_one_block(encoding, request):
        return "the encoding needs all keys in one block"
    if keys.given is not None:
        return "a mask is given, and the kernels know only causality, windows and segments"
    if keys.bias is not None:
        return "a bias is given, and the kernels have none"
    if 0 in (*queries.q.shape, *keys.v.shape):
        return "there are no queries or no keys"
    return None


def whole_blocks(
    encoding: Encoding, request: Request, sizes: BlockSizes, keys: int | None = None
) -> Stream:
    """Returns the stream with whole blocks of queries and of keys. If `keys` is given, the keys are
    padded to this number.
    """
    padding, given = -request.length % sizes.queries, len(request.keys.indices)
    stream = stream_of(encoding, request, sizes, one_block=False, padding=padding)
    missing = -given % sizes.near if keys is None else keys - given
    if not missing:
        return stream
    padded = along_sequence(pad_by(missing), stream.keys)
    indices = jnp.pad(stream.keys.indices, (0, missing), constant_values=-1)
    return stream.part(stream.queries, dataclasses.replace(padded, indices=indices))


def why_untraced(execution: Execution, stream: Stream) -> str | None:
    """Returns why the kernels cannot be built for a stream of these shapes; None if they can."""
    leaves, tree = jax.tree.flatten(stream)
    avals, config = tuple((x.shape, x.dtype) for x in leaves), cast(Any, jax.config)
    return _untraced(execution, tree, avals, config.jax_default_matmul_precision)


@functools.lru_cache(maxsize=256)
def _untraced(
    execution: Execution, tree: Any, avals: tuple[Any, ...], precision: str | None
) -> str | None:
    """Returns why the kernels cannot be built for a stream with this structure and these shapes;
    `precision` is JAX's default, on which kernels depend.
    """
    del precision

    stream = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*aval) for aval in avals])
    try:
        with execution.planning() as planning:
            jax.eval_shape(functools.partial(_build, planning), stream)
    except NotATile as reason:
        return str(reason)
    except (
        ConfigError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # what tracing of a hook may raise
        why = f"its hooks cannot be traced in a kernel ({first_line(error)})"
        logging.getLogger("cope_jax").warning(
            "attention: an encoding has no kernel, because %s", why
        )
        return why
    return None


def _build(execution: Execution, stream: Stream) -> None:
    _forward(execution, stream, gradient=False)
    out, *residuals = _forward(execution, stream, gradient=True)
    _backward(execution, (stream, out, *residuals), out)


def attend(execution: Execution, stream: Stream) -> Array:
    """Computes out_BHLK for whole blocks of queries; keys are whole parts of `execution.keys`,
    or all.

    The kernels have no forward mode: there `blockwise` takes their place.
    """
    xla = blockwise.passes()

    def forward(stream: Stream, gradient: bool) -> Any:
        kernel = functools.partial(_forward, execution, gradient=gradient)
        return derivative.by_xla(kernel, lambda stream: xla.forward(stream, gradient))(stream)

    backward = derivative.by_xla(functools.partial(_backward, execution), xla.backward)
    return derivative.attend(Passes(forward, backward), stream)


def _forward(
    execution: Execution, stream: Stream, *, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    if execution.halves:
        result = tile_strip.forward(stream, execution, gradient=gradient)
    else:
        state = streaming_softmax.start(stream, gradient)
        state = tile_flash.accumulate(stream, state, execution, first=True)
        result = streaming_softmax.finish(stream, state)
    return checkpoint_name(result, RESIDUALS)


def _backward(execution: Execution, kept: Any, dout_BHLK: Array) -> Any:
    stream, *result = kept
    if execution.halves:
        dparams, dqueries, dkeys = tile_strip.backward(stream, result, dout_BHLK, execution)
    else:
        residuals = Residuals.of(dout_BHLK, *result)
        state = streaming_gradient.start(stream, residuals, KeyGradients.zeros(stream.keys))
        state = tile_flash.backward(stream, residuals, state, execution)
        (dparams, dqueries), dkeys = streaming_gradient.finish(stream, residuals, state), state.keys
    cotangents = dqueries.of(stream.queries), dkeys.of(stream.keys)
    return streaming_gradient.of(stream, dparams, *cotangents)
