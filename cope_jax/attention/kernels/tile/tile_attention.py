"""Attention by the two kernels of `tile_flash`, and its derivative, on any backend."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array
from cope_jax.attention import blockwise, derivative, streaming_gradient, streaming_softmax
from cope_jax.attention.derivative import RESIDUALS, Passes
from cope_jax.attention.kernels.tile import tile_flash
from cope_jax.attention.kernels.tile.tile_plan import Execution
from cope_jax.attention.kernels.tile.tile_values import NotATile
from cope_jax.attention.stream import Stream
from cope_jax.attention.streaming_gradient import KeyGradients, Residuals
from cope_jax.errors import ConfigError


def why_untraced(execution: Execution, stream: Stream) -> str | None:
    """Returns why the kernels cannot be built for a stream of these shapes; None if they can."""
    leaves, tree = jax.tree.flatten(stream)
    return _untraced(execution, tree, tuple((x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=256)
def _untraced(execution: Execution, tree: Any, avals: tuple[Any, ...]) -> str | None:
    """Returns why the kernels cannot be built for a stream with this structure and these shapes."""

    def build(stream: Stream) -> None:
        def add(gradient: bool) -> Any:
            start = streaming_softmax.start(stream, gradient)
            return tile_flash.accumulate(stream, start, execution, first=True)

        add(gradient=False)
        state = add(gradient=True)
        dout, sums = state.weighted.astype(stream.keys.v.dtype), state.slope_total
        residuals = Residuals(dout, state.total, state.total, sums)
        start = streaming_gradient.start(stream, residuals, KeyGradients.zeros(stream.keys))
        tile_flash.backward(stream, residuals, start, execution)

    try:
        jax.eval_shape(
            build, jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*aval) for aval in avals])
        )
    except NotATile as reason:
        return str(reason)
    except (
        ConfigError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # what tracing of a hook may raise
        return f"its hooks cannot be traced in a kernel ({str(error).splitlines()[0]})"
    return None


def attend(execution: Execution, stream: Stream) -> Array:
    """Computes out_BHLK for whole blocks of queries; keys are whole parts of `execution.keys`.

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
    state = tile_flash.accumulate(
        stream, streaming_softmax.start(stream, gradient), execution, first=True
    )
    return checkpoint_name(streaming_softmax.finish(stream, state), RESIDUALS)


def _backward(execution: Execution, kept: Any, dout_BHLK: Array) -> Any:
    stream, *result = kept
    residuals = Residuals.of(dout_BHLK, *result)
    state = streaming_gradient.start(stream, residuals, KeyGradients.zeros(stream.keys))
    state = tile_flash.backward(stream, residuals, state, execution)
    dparams, dqueries = streaming_gradient.finish(stream, residuals, state)
    cotangents = dqueries.of(stream.queries), state.keys.of(stream.keys)
    return streaming_gradient.of(stream, dparams, *cotangents)
