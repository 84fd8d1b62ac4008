"""Runs layers of equal shape by their stacked parameters, in one loop if they are many."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.attention.derivative import RESIDUALS
from cope_jax.ops.product import PRODUCT

L = TypeVar("L", bound=nnx.Module)

Remat = Literal["none", "full", "attention", "dots"]
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(RESIDUALS),
    # Saved by name: policies do not see products in functions with custom gradients, and CoPE's
    # sums are products too.
    "dots": jax.checkpoint_policies.save_only_these_names(RESIDUALS, PRODUCT),
}
"""Arrays that a layer saves for the backward pass besides its input, by `remat`."""


def create_stack(create: Callable[[nnx.Rngs], L], num_layers: int, *, rngs: nnx.Rngs) -> L:
    """Creates `num_layers` modules with different random numbers, stacked along a leading axis.

    >>> create_stack(lambda rngs: nnx.Linear(2, 3, rngs=rngs), 4, rngs=nnx.Rngs(0)).kernel.shape
    (4, 2, 3)
    """

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs: nnx.Rngs) -> L:
        return create(rngs)

    return stack(rngs)


def scan_stack(
    stack: L,
    layer: Callable[[L, Any, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any,
    remat: Remat = "none",
    forms: Sequence[Callable[[L], L]] | None = None,
) -> tuple[Any, Any]:
    """Applies a stack of layers; of more than two in one loop, so that program and compile time do
    not grow with depth.

    Args:
      stack: from `create_stack`.
      layer: maps (one layer, carry, the layer's input) to (carry, the layer's output).
      carry: the value that passes through all layers.
      inputs: the input of each layer, with a leading axis over layers; None means that the layers
        have no input.
      remat: "none" recomputes nothing in the backward pass; a name of `POLICIES` recomputes what
        the policy does not keep.
      forms: what changes each layer before it runs, such as another window; the program then
        contains every layer, instead of one loop. None means that all layers are equal.

    Returns:
      (carry, outputs with a leading axis over the layers).
    """
    graph, stacked = nnx.split(stack)

    def body_of(form: Callable[[L], L]) -> Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]:
        def body(carry: Any, state_and_input: tuple[Any, Any]) -> tuple[Any, Any]:
            state, layer_input = state_and_input
            return layer(form(nnx.merge(graph, state)), carry, layer_input)

        return body if remat == "none" else jax.checkpoint(body, policy=POLICIES[remat])

    if forms is None:
        # A loop fills what it keeps with zeros first, a fifth of a small model's step on a CPU.
        few = len(jax.tree.leaves(stacked)[0]) <= 2
        body = body_of(lambda module: module)
        return jax.lax.scan(body, carry, (stacked, inputs), unroll=few)
    outputs = []
    for number, form in enumerate(forms):
        of_layer = jax.tree.map(lambda leaf, number=number: leaf[number], (stacked, inputs))
        carry, output = body_of(form)(carry, of_layer)
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
