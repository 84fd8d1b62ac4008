"""The operators of PyTorch: they run a program of JAX on tensors, without copies, and its gradient.

`torch.compile` does not look into an operator. The shapes of its results come from JAX's.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cope_jax.errors import ConfigError

PARAMETER = "parameter "
"""Begins the names of those tensors that are parameters of the encoding."""


@torch.library.custom_op("cope_jax::run", mutates_args=())
def run(tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """Returns the result of a call, and the residuals if the call needs gradients.

    `key` is the JSON of `torch_program.Call`.
    """
    return _exchange(_program(_key_of_pull(tensors, key)).run, tensors)


@run.register_fake
def _(tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    return _like(_program(_key_of_pull(tensors, key)).results, tensors[0])


@torch.library.custom_op("cope_jax::pull", mutates_args=())
def pull(
    values: Sequence[torch.Tensor],
    cotangent: torch.Tensor,
    key: str,
    sources: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Returns the gradients of a call; `values` are what its program needs of the call, and
    `sources` are the tensors that need these gradients, if they may be differentiated again.
    """
    return _exchange(_program(key).pull, [*values, cotangent])


@pull.register_fake
def _(
    values: Sequence[torch.Tensor],
    cotangent: torch.Tensor,
    key: str,
    sources: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    return _like(_program(key).gradients, cotangent)


def _keep(ctx: Any, inputs: tuple[list[torch.Tensor], str], output: list[torch.Tensor]) -> None:
    tensors, key = inputs
    ctx.key = _key_of_pull(tensors, key)
    ctx.count, ctx.wrt = len(tensors), json.loads(key)[-1]
    ctx.mark_non_differentiable(*output[1:])
    values, ctx.needed = [*tensors, *output], _program(ctx.key).needed
    numbers = list(dict.fromkeys((*ctx.needed, *ctx.wrt)))
    ctx.sources = [numbers.index(number) for number in ctx.wrt]
    ctx.save_for_backward(*(values[number] for number in numbers))


def _differentiate(
    ctx: Any, cotangents: list[torch.Tensor]
) -> tuple[list[torch.Tensor | None], None]:
    gradients: list[torch.Tensor | None] = [None] * ctx.count
    saved = list(ctx.saved_tensors)
    # Without the sources, residuals would cut the graph, and second derivatives would be 0.
    sources = [saved[at] for at in ctx.sources] if torch.is_grad_enabled() else []
    computed = pull(saved[: len(ctx.needed)], cotangents[0], ctx.key, sources)
    for number, gradient in zip(ctx.wrt, computed, strict=True):
        gradients[number] = gradient
    return gradients, None


run.register_autograd(_differentiate, setup_context=_keep)


def _refuse(ctx: Any, *cotangents: Any) -> None:
    raise ConfigError(
        "cope_jax.torch has first derivatives only: take jax.jvp of jax.grad of cope_jax.attend"
    )


pull.register_autograd(_refuse)


def _key_of_pull(tensors: Sequence[torch.Tensor], key: str) -> str:
    """Returns the text that names a program: the call, the type of device, shapes and types."""
    # Tensors without memory are planned as on a CPU.
    device = tensors[0].device
    kind = device.type.replace("meta", "cpu")
    if device.index:
        raise ConfigError(
            f"the tensors are on {device}, but cope_jax.torch runs on the first GPU of a process: "
            f"start it with CUDA_VISIBLE_DEVICES={device.index}"
        )
    shapes = [[list(map(int, x.shape)), str(x.dtype).removeprefix("torch.")] for x in tensors]
    return json.dumps([key, kind, shapes])


@functools.lru_cache(256)  # a program that was dropped is traced again, with the same residuals
def _program(key: str) -> Any:
    from cope_jax.torch.torch_program import program

    return program(key)


def _exchange(
    compute: Callable[[list[torch.Tensor]], list[Any]], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns tensors in the memory of JAX's results, which they keep alive."""
    return [torch.from_dlpack(x) for x in compute([x.detach().contiguous() for x in tensors])]


def _like(shapes: Sequence[Any], tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors without values, on the device of another."""
    return [tensor.new_empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in shapes]
