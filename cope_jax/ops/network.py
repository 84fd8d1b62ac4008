"""A small network that turns one number into another, and the straight pieces of its graph."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array
from cope_jax.ops import tile
from cope_jax.ops.gather import take_rows

MOST_UNITS = 64  # of a network in a kernel


class Network(NamedTuple):
    """A network with one hidden layer, y_h = Σ_f relu(x·kernel_f + bias_f)·out_fh."""

    kernel_F: Array
    bias_F: Array
    out_FH: Array


class Pieces(NamedTuple):
    """The same function as `Network`, y = slope_n·x + offset_n for an x with n knots below.

    A hidden unit bends the graph at a knot, and between two knots the graph is straight. So n, of
    which there are N = F + 1, says all about x.
    """

    knots_F: Array  # ascending
    slopes_HN: Array
    offsets_HN: Array


def pieces(network: Network) -> Pieces:
    """Returns the pieces of a network.

    >>> network = Network(jnp.array([1.0, -1.0]), jnp.array([-2.0, 1.0]), jnp.ones((2, 1)))
    >>> knots, slopes, offsets = pieces(network)
    >>> slopes.tolist(), offsets.tolist()
    ([[-1.0, 0.0, 1.0]], [[1.0, 0.0, -2.0]])
    """
    kernel_F, bias_F, out_FH = network
    size, rises_F, flat_F = len(kernel_F), kernel_F >= 0, kernel_F == 0
    limits = jnp.finfo(kernel_F.dtype)
    most = float(limits.max) / 2
    knots_F = jnp.clip(-bias_F / jnp.where(flat_F, 1.0, kernel_F), -most, most)
    knots_F = jnp.where(flat_F, jnp.where(bias_F > 0, -most, most), knots_F)
    # A unit is 0 at its own knot, and so is its derivative. An x there has no knot below, so where
    # a unit falls, the knot is the next lower number; next to 0, one that no CPU takes for 0.
    lower_F = knots_F - (jnp.abs(knots_F) * limits.eps + 8 * limits.tiny)
    knots_F = jax.lax.stop_gradient(jnp.where(rises_F, knots_F, lower_F))
    number_F, piece_N = (jnp.arange(n, dtype=jnp.int32) for n in (size, size + 1))
    before_FF = (knots_F[None] < knots_F[:, None]) | (
        (knots_F[None] == knots_F[:, None]) & (number_F[None] < number_F[:, None])
    )
    place_F = before_FF.astype(kernel_F.dtype).sum(1).astype(jnp.int32)
    ordered_F = jnp.where(place_F[:, None] == number_F[None], knots_F[:, None], 0.0).sum(0)
    passed_FN = place_F[:, None] < piece_N[None]
    active_FN = jnp.where(passed_FN == rises_F[:, None], 1.0, 0.0).astype(kernel_F.dtype)
    # Not products of matrices, whose factors a TPU would round.
    slopes_HN, offsets_HN = (
        (out_FH[:, :, None] * (x_F[:, None] * active_FN)[:, None]).sum(0)
        for x_F in (kernel_F, bias_F)
    )
    return Pieces(ordered_F, slopes_HN, offsets_HN)


def evaluate(x_BLM: Array, network: Network, of_rows: Pieces) -> Array:
    """Returns the network's value for each number, `[B, H, L, M]`.

    A kernel reads the pieces, which takes less than a hidden layer for each pair. XLA computes the
    layer, for which it has fast products. Both round, so where units nearly cancel, they differ.

    Args:
      x_BLM: the numbers.
      network: the network.
      of_rows: its pieces for each row, `[B, H, L, F]` and `[B, H, L, N]`.

    Raises:
      NotImplementedError: a kernel would need many pieces, which each query has.

    >>> network = Network(jnp.ones(2), jnp.ones(2), jnp.ones((2, 1)))
    >>> rows = Pieces(*(x[None, None, None] for x in pieces(network)))
    >>> evaluate(jnp.array([[[-1.0, 3.0]]]), network, rows).tolist()
    [[[[0.0, 8.0]]]]
    """
    if tile.is_tracing():
        if (units := len(network.kernel_F)) > MOST_UNITS:
            raise NotImplementedError(f"{units} hidden units are more than {MOST_UNITS}")
        x_B1LM = x_BLM[:, None]
        number_B1LM = tile.count_below_p.bind(of_rows.knots_F, x_B1LM)
        slope, offset = (take_rows(z, number_B1LM) for z in of_rows[1:])
        return slope * x_B1LM + offset
    kernel_F, bias_F, out_FH = network
    hidden_BLMF = jax.nn.relu(
        x_BLM[..., None] * kernel_F[None, None, None] + bias_F[None, None, None]
    )
    return jnp.einsum("BLMF,FH->BHLM", hidden_BLMF, out_FH)
