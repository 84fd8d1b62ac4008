"""Recurrent layers: cells, their loop over time, and bidirectional layers."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.ops.product import linear
from cope_jax.registry import check_at_least, check_fields

CellName = Literal["tanh", "lstm"]
Carry = tuple[Array, ...]
"""The state between steps, the output last: (h_BP,) of a tanh cell, (c_BN, h_BP) of an LSTM."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step of a recurrent layer, from z = W_x x + b, computed for all steps beforehand.

    "tanh", Elman (1990): h' = tanh(z + W_h h).

    "lstm", Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000) and the
    projection of Sak et al. (arXiv 1402.1128). The gates are in the order i, f, g, o:

        (i, f, g, o) = z + W_h h
        c' = clip(σ(f + forget_bias) · c + σ(i) · tanh(g))
        h' = σ(o) · tanh(c'), or clip(W_p (σ(o) · tanh(c'))) with a projection

    Attributes:
      name: "tanh" or "lstm".
      width: N, the width of the state.
      projection: P, the width of h. None means that P is N, and there is no W_p.
      cell_clip: c' is clipped to ± this value; None means no clip.
      projection_clip: the projected h' is clipped to ± this value; None means no clip.
      forget_bias: a constant added to f; not a parameter.
    """

    name: CellName = "lstm"
    width: int = 256
    projection: int | None = None
    cell_clip: float | None = None
    projection_clip: float | None = None
    forget_bias: float = 0.0

    def __post_init__(self):
        check_fields(self, "cell")
        check_at_least(1, "cell", width=self.width, projection=self.projection)
        check_at_least(0, "cell", cell_clip=self.cell_clip, projection_clip=self.projection_clip)
        if self.name == "tanh" and any(
            (self.projection, self.cell_clip, self.projection_clip, self.forget_bias)
        ):
            raise ConfigError(
                "a tanh cell has no projection, clips or forget_bias: use name='lstm'"
            )
        if self.projection is None and self.projection_clip is not None:
            raise ConfigError(
                f"cell.projection_clip={self.projection_clip} needs a projection: set cell.projection"
            )

    @property
    def outputs(self) -> int:
        """P, the width of h."""
        return self.projection or self.width

    @property
    def gates(self) -> int:
        """The width of z."""
        return self.width * (4 if self.name == "lstm" else 1)

    def matrices(self, inputs: int) -> int:
        """The number of parameters in the matrices of this cell with inputs of width `inputs`.

        >>> Cell(width=3).matrices(inputs=2)
        60
        """
        return self.gates * (inputs + self.outputs) + (
            self.width * self.projection if self.projection else 0
        )

    def initial_carry(self, batch: int, dtype: Any = jnp.float32) -> Carry:
        """The state before the first step: zeros."""
        h_BP = jnp.zeros((batch, self.outputs), dtype)
        return (h_BP,) if self.name == "tanh" else (jnp.zeros((batch, self.width), dtype), h_BP)

    def step(
        self, weights: tuple[Array, ...], carry: Carry, z_BG: Array, shift_BP: Array | None
    ) -> tuple[Carry, Array]:
        """Returns (next state, input of the projection); adds `shift_BP` before the clip."""
        z_BG = z_BG + carry[-1] @ weights[0]
        if self.name == "tanh":
            h_BN = jnp.tanh(z_BG)
            return (h_BN,), h_BN
        i_BN, f_BN, g_BN, o_BN = jnp.split(z_BG, 4, axis=-1)
        c_BN = jax.nn.sigmoid(f_BN + self.forget_bias) * carry[0] + jax.nn.sigmoid(i_BN) * jnp.tanh(
            g_BN
        )
        c_BN = _clip(c_BN, self.cell_clip)
        m_BN = jax.nn.sigmoid(o_BN) * jnp.tanh(c_BN)
        if shift_BP is None:
            return (c_BN, m_BN), m_BN
        return (c_BN, _clip(m_BN @ weights[1] + shift_BP, self.projection_clip)), m_BN


class Recurrent(nnx.Module):
    """Runs a cell over time: (c_t, h_t) = step(c_{t−1}, h_{t−1}, W_x x_t + b), y_t = h_t.

    Only the products with the state are computed in the loop. The products with the inputs are one
    product for all steps. In the backward pass, the gradient of each matrix is one product for all
    steps. All matrices and b are initialised uniformly within ±1/√N.

    >>> layer = Recurrent(Cell("lstm", width=4), inputs=3, rngs=nnx.Rngs(0))
    >>> y_BLP, (c_BN, h_BP) = layer(jnp.ones((2, 5, 3)), lengths_B=jnp.array([5, 3]))
    >>> y_BLP.shape, bool((y_BLP[1, 3:] == 0).all()), bool((h_BP[1] == y_BLP[1, 2]).all())
    ((2, 5, 4), True, True)
    """

    def __init__(self, cell: Cell, inputs: int, *, rngs: nnx.Rngs):
        self.cell = cell

        def uniform(*shape: int, axes: tuple[str | None, ...]) -> nnx.Param[Array]:
            bound = cell.width**-0.5
            return nnx.Param(
                jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound), axes=axes
            )

        self.inner_DG = uniform(inputs, cell.gates, axes=("embed", "mlp"))
        self.state_PG = uniform(cell.outputs, cell.gates, axes=("embed", "mlp"))
        self.bias_G = uniform(cell.gates, axes=("mlp",))
        self.outer_NP = (
            uniform(cell.width, cell.projection, axes=("mlp", "embed")) if cell.projection else None
        )

    def initial_carry(self, batch: int) -> Carry:
        """The state before the first step: zeros of the parameters' type."""
        return self.cell.initial_carry(batch, self.bias_G[...].dtype)

    def __call__(
        self,
        x_BLD: Array,
        carry: Carry | None = None,
        *,
        lengths_B: Array | None = None,
        reverse: bool = False,
    ) -> tuple[Array, Carry]:
        """Runs the cell over each sequence.

        Args:
          x_BLD: the inputs.
          carry: the state before the first step; None means zeros.
          lengths_B: number of real inputs of each row, which are at the start of the row; None
            means that all inputs are real. The other inputs are not read: their outputs are 0, and
            they do not change the state.
          reverse: True runs from each row's last real input to its first; False runs from the first
            to the last.

        Returns:
          (y_BLP in the order of the inputs, the state after the last step).
        """
        batch, length, _ = x_BLD.shape
        carry = self.initial_carry(batch) if carry is None else carry
        x_LBD = jnp.swapaxes(x_BLD, 0, 1)
        real_LB1 = None
        if lengths_B is not None:
            real_LB1 = (
                np.arange(length, dtype=np.int32)[:, None, None]
                < jnp.asarray(lengths_B)[None, :, None]
            )
            # Otherwise a NaN in an input that is not real would reach the gradients, because 0 ·
            # NaN is NaN.
            x_LBD = jnp.where(real_LB1, x_LBD, jnp.zeros((), x_LBD.dtype))
        z_LBG = linear(x_LBD, self.inner_DG[...]) + self.bias_G[...][None, None]
        weights = (
            (self.state_PG[...],)
            if self.outer_NP is None
            else (self.state_PG[...], self.outer_NP[...])
        )
        y_LBP, carry = _run((self.cell, reverse), weights, carry, z_LBG, real_LB1)
        return jnp.swapaxes(y_LBP, 0, 1), carry


class Bidirectional(nnx.Module):
    """Two layers over one input, y_t = [forward h_t; backward h_t]. Schuster & Paliwal (1997).

    >>> layer = Bidirectional(Cell("tanh", width=4), inputs=3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 3)))[0].shape
    (2, 5, 8)
    """

    def __init__(self, cell: Cell, inputs: int, *, rngs: nnx.Rngs):
        self.forward = Recurrent(cell, inputs, rngs=rngs)
        self.backward = Recurrent(cell, inputs, rngs=rngs)

    def __call__(
        self,
        x_BLD: Array,
        carry: tuple[Carry, Carry] | None = None,
        *,
        lengths_B: Array | None = None,
    ) -> tuple[Array, tuple[Carry, Carry]]:
        """Returns (y_BL2P, last states), of arguments as of `Recurrent`, with states in pairs."""
        before = (None, None) if carry is None else carry
        forward, last = self.forward(x_BLD, before[0], lengths_B=lengths_B)
        backward, first = self.backward(x_BLD, before[1], lengths_B=lengths_B, reverse=True)
        return jnp.concatenate([forward, backward], axis=-1), (last, first)


def clear(carry: PyTree, reset_B: Array | None) -> PyTree:
    """Returns `carry` with zeros in rows where `reset_B` is not 0; unchanged for None.

    >>> clear(jnp.ones((2, 1)), jnp.array([1.0, 0.0])).tolist()
    [[0.0], [1.0]]
    """
    if reset_B is None:
        return carry

    def keep(leaf: Array) -> Array:
        return jnp.where(
            (reset_B != 0).reshape(-1, *(1,) * (leaf.ndim - 1)), jnp.zeros((), leaf.dtype), leaf
        )

    return jax.tree.map(keep, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    how: tuple[Cell, bool],
    weights: tuple[Array, ...],
    carry: Carry,
    z_LBG: Array,
    real_LB1: Array | None,
) -> tuple[Array, Carry]:
    return _scan(how, weights, carry, z_LBG, _shift(how, carry, z_LBG), real_LB1)[0]


def _scan(
    how: tuple[Cell, bool],
    weights: tuple[Array, ...],
    carry: Carry,
    z_LBG: Array,
    shift_LBP: Array | None,
    real_LB1: Array | None,
) -> tuple[tuple[Array, Carry], tuple[Array, Array]]:
    """Returns ((outputs, last state), (inputs of W_h at each step, inputs of W_p at each step))."""
    cell, reverse = how

    def body(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        z_BG, shift_BP, real_B1 = inputs
        new, m_BN = cell.step(weights, carry, z_BG, shift_BP)
        y_BP = new[-1]
        if real_B1 is not None:
            y_BP = jnp.where(real_B1, y_BP, jnp.zeros((), y_BP.dtype))
            new = tuple(jnp.where(real_B1, *pair) for pair in zip(new, carry, strict=True))
        return new, (y_BP, carry[-1], m_BN)

    carry, (y_LBP, h_LBP, m_LBN) = jax.lax.scan(
        body, carry, (z_LBG, shift_LBP, real_LB1), reverse=reverse
    )
    return (y_LBP, carry), (h_LBP, m_LBN)


def _shift(how: tuple[Cell, bool], carry: Carry, z_LBG: Array) -> Array | None:
    """Zeros to add to projections before the clip; their gradient is that of the projections."""
    return jnp.zeros((len(z_LBG), *carry[-1].shape), z_LBG.dtype) if how[0].projection else None


def _forward(
    how: Any, weights: tuple[Array, ...], carry: Carry, z_LBG: Array, real_LB1: Array | None
) -> Any:
    def run(carry: Carry, z_LBG: Array, shift_LBP: Array | None) -> Any:
        return _scan(how, weights, carry, z_LBG, shift_LBP, real_LB1)

    outputs, pull, multiplied = jax.vjp(run, carry, z_LBG, _shift(how, carry, z_LBG), has_aux=True)
    return outputs, (pull, multiplied)


def _backward(how: Any, residuals: Any, gradient: Any) -> tuple[Any, ...]:
    # W_h h is added to z, so both have the same gradient, and the gradient of W_h needs no loop.
    # The same holds for W_p.
    pull, multiplied = residuals
    dcarry, dz_LBG, dshift_LBP = pull(gradient)
    pairs = zip(multiplied, (dz_LBG, dshift_LBP), strict=True)
    dweights = tuple(jnp.einsum("LBI,LBO->IO", x, dy) for x, dy in pairs if dy is not None)
    return dweights, dcarry, dz_LBG, None


_run.defvjp(_forward, _backward)


def _clip(x: Array, bound: float | None) -> Array:
    return x if bound is None else jnp.clip(x, -bound, bound)
