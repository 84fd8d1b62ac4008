"""Position encodings as modules of PyTorch, and attention with them on tensors."""

import inspect
import json
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from cope_jax.errors import ConfigError
from cope_jax.registry import abridged, checked, unknown
from cope_jax.torch.torch_op import PARAMETER, run

INTEGERS = ("q_positions", "k_positions", "q_segment_ids", "k_segment_ids", "dropout_key")
"""Arguments of `attend` that are int32 in JAX."""
CAST = ("q_BLHK", "k_BMGK", "v_BMGK", "x", "bias")
"""Arguments of `attend` that autocast converts, as those of PyTorch's attention."""
IMPLEMENTATIONS = ("auto", "full", "blockwise", "fused")
"""The implementations that run on the device of the tensors."""
OTHER_NAMES = {
    "attn_mask": "mask for booleans, bias for numbers to add",
    "is_causal": "causal, which is True by default",
    "dropout_p": "dropout_rate",
    "enable_gqa": "Encoding(…, num_kv_heads=…)",
    "segment_ids": "q_segment_ids and k_segment_ids",
    "positions": "q_positions and k_positions",
}
"""Names that other functions of attention have for options, and ours."""
WHOLE_NUMBERS = (torch.int32, torch.int64, torch.uint32, torch.uint64)
"""The types that a key of dropout may have."""


class Encoding(nn.Module):
    """A position encoding whose parameters are ordinary parameters of PyTorch.

    Called with queries, keys and values, it computes `attend`. Initial parameters are those of the
    JAX encoding; their random numbers come from PyTorch's generator.

    >>> cope = Encoding("cope", num_heads=2, head_dim=8, npos_max=16)
    >>> {name: tuple(x.shape) for name, x in cope.named_parameters()}
    {'table': (16, 8)}
    >>> q = k = v = torch.randn(1, 5, 2, 8)
    >>> cope(q, k, v).shape
    torch.Size([1, 5, 2, 8])

    Args:
      name: a name of `cope_jax.encodings.names()`, `name(option=value)`, or several of these joined
        by `+`.
      num_heads: H, the number of query heads.
      head_dim: K, the width of one head.
      num_kv_heads: G, the number of key/value heads; None means H.
      model_dim: D, the width of the layer's input; None means H·K.
      max_length: the length of the longest sequence to expect; some tables have this number of
        rows. None means that the length is not known.
      **options: the options of the encoding; of a composition, a dict for each part.

    Raises:
      ConfigError: a name or an option is unknown, or a value is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        model_dim: int | None = None,
        max_length: int | None = None,
        **options: Any,
    ):
        from cope_jax import encodings
        from cope_jax.torch import torch_program

        super().__init__()
        for word in {"device", "dtype"} & options.keys():
            raise ConfigError(f"{word} is no option of an encoding: create it, then call .to(…)")
        self.parts = encodings.config_of(name, _fixed(name, options)).parts
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "num_kv_heads": num_kv_heads}
        sizes |= {"model_dim": model_dim, "max_length": max_length}
        self.spec = json.dumps([self.parts, _fixed(name, sizes)])
        seed = int(torch.randint(2**31 - 1, (), device="cpu"))
        initial = torch_program.initial_parameters(self.spec, seed)
        self.paths = tuple(initial)
        for path, values in initial.items():
            module: nn.Module = self
            *parents, leaf = path.split(".")
            for parent in parents:
                if parent not in dict(module.named_children()):
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            module.register_parameter(leaf, nn.Parameter(torch.tensor(values)))

    def forward(self, q_BLHK: Tensor, k_BMGK: Tensor, v_BMGK: Tensor, **options: Any) -> Tensor:
        """Returns `attend` with this encoding."""
        return attend(q_BLHK, k_BMGK, v_BMGK, encoding=self, **options)

    def embed(self, x_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        """Adds position embeddings to the token embeddings, and returns the sum, x_BLD."""
        tensors = {"x_BLD": x_BLD, "positions_BL": positions_BL}
        _check_tensors(tensors)
        if positions_BL.dtype == torch.bool:
            raise ConfigError("positions_BL must be numbers, got booleans")
        _check_size("positions_BL", positions_BL)
        whole = not positions_BL.is_floating_point()
        if (
            whole
            and positions_BL.numel()
            and positions_BL.device.type == "cpu"
            and not _is_traced()
        ):
            from cope_jax.torch import torch_program

            low, high = int(positions_BL.min()), int(positions_BL.max())
            torch_program.check_positions(self.spec, low, high)
        dtype = torch.int32 if whole else positions_BL.dtype
        tensors["positions_BL"] = positions_BL.to(x_BLD.device, dtype)
        return _call("embed", self, tensors, {})

    def facts(self, crops: bool = False) -> Any:
        """Returns what a model must know of the encoding, a `torch_program.Facts`."""
        from cope_jax.torch import torch_program

        return torch_program.facts(self.spec, crops)

    def extra_repr(self) -> str:
        return "+".join(f"{name}({options or ''})" for name, options in self.parts)


def attend(
    q_BLHK: Tensor,
    k_BMGK: Tensor,
    v_BMGK: Tensor,
    *,
    encoding: Encoding,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    embedded: bool = False,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    k_segment_ids: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: Tensor | None = None,
    blocks: Sequence[int] | None = None,
    **others: Any,
) -> Tensor:
    """Computes `cope_jax.attention.attend` on tensors of a CPU or an NVIDIA GPU, without copying
    tensors that are contiguous.

    Queries, keys and values are `[B, L, heads, K]`. Gradients reach q, k, v, x, bias and the
    parameters of the encoding. The first call for given shapes compiles. Under autocast, q, k, v,
    x and bias get its type, as in `torch.nn.functional.scaled_dot_product_attention`.

    Args:
      q_BLHK: queries.
      k_BMGK: keys; G divides H (grouped-query attention).
      v_BMGK: values.
      encoding: the position encoding.
      x: the input x_BMD of the layer, for the M key tokens; some encodings read it.
      bias: numbers that are added to the content logits, `[B, H, L, M]`; B and H may be 1.
      embedded: True if the model's input went through `encoding.embed`.
      q_positions: numbers `[B, L]` or `[1, L]`. If None, positions are M−L … M−1.
      k_positions: numbers `[B, M]` or `[1, M]`. If None, positions are 0 … M−1.
      q_segment_ids: integers `[B, L]` or `[1, L]`. A query sees only keys of its own segment.
      k_segment_ids: integers `[B, M]` or `[1, M]`. Give both segment ids or neither.
      mask: bool, `[B, 1, L, M]`; any axis may have size 1. True where a query may see a key.
      causal: hide the keys after each query; the last query is at the last key.
      window: hide the keys that are `window` or more indices away from the query.
      scale: what multiplies q·k; None means 1/√K.
      logits_soft_cap: c; content logits s become c·tanh(s/c).
      implementation: "auto", "full", "blockwise" or "fused".
      dropout_rate: share of attention weights that is dropped.
      dropout_key: two integers, the random key of dropout. If None, PyTorch's generator draws them.
      blocks: sizes of a block of queries, a near block of keys and a far block of keys.
      **others: none; an error says the name of an option that other libraries name otherwise.

    Returns:
      out_BLHK, in the type of the values.

    Raises:
      ConfigError: shapes, types or devices do not fit, or the encoding cannot run so.
    """
    for name in others:
        if name in OTHER_NAMES:
            raise ConfigError(f"attend has no option {name}: use {OTHER_NAMES[name]}")
        raise unknown("option of attend", name, set(inspect.signature(attend).parameters))
    if not isinstance(encoding, Encoding):
        raise ConfigError(
            "encoding must be a cope_jax.torch.Encoding(name, num_heads=…, head_dim=…), got "
            f"{abridged(encoding)}"
        )
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise unknown("implementation", implementation, IMPLEMENTATIONS)
    if dropout_rate and dropout_key is None and isinstance(q_BLHK, Tensor):
        dropout_key = torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=q_BLHK.device)
    given = {
        **{"q_BLHK": q_BLHK, "k_BMGK": k_BMGK, "v_BMGK": v_BMGK, "x": x, "bias": bias},
        **{"q_positions": q_positions, "k_positions": k_positions, "mask": mask},
        **{"q_segment_ids": q_segment_ids, "k_segment_ids": k_segment_ids},
        "dropout_key": dropout_key,
    }
    options = {
        **{"embedded": embedded, "causal": causal, "window": window, "scale": scale},
        **{"logits_soft_cap": logits_soft_cap, "implementation": implementation},
        **{"dropout_rate": dropout_rate, "blocks": blocks},
    }
    tensors = {name: x for name, x in given.items() if x is not None}
    _check_tensors(tensors)
    return _call("attend", encoding, tensors, _fixed("attend", options))


def _check_tensors(tensors: dict[str, Any]) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            fix = ", such as torch.tensor([3, 1])" if name == "dropout_key" else ""
            if isinstance(x, np.ndarray):
                fix = f", torch.from_numpy({name})"
            raise ConfigError(
                f"{name} must be a tensor{fix}, got {abridged(x)} of type {type(x).__name__}"
            )
        if x.layout != torch.strided:
            raise ConfigError(f"{name} has the layout {x.layout}: pass {name}.to_dense()")
        if name == "dropout_key" and (x.shape != (2,) or x.dtype not in WHOLE_NUMBERS):
            raise ConfigError(f"dropout_key must be two integers, got {abridged(x)}")


def _call(
    hook: str, encoding: Encoding, tensors: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Runs a hook; `tensors` are its arguments by name."""
    if not _is_traced() and torch._C._are_functorch_transforms_active():
        raise ConfigError(
            "cope_jax.torch has none of the transforms of torch.func, such as grad, jvp and vmap: use backward() or "
            "torch.autograd.grad"
        )
    device = next(iter(tensors.values())).device
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    for path in encoding.paths:
        tensors[PARAMETER + path] = operator.attrgetter(path)(encoding)
    for name, x in tensors.items():
        if x.device != device:
            raise ConfigError(
                f"{name} is on {x.device}, and {next(iter(tensors))} is on {device}: move them to one device"
            )
        if name in INTEGERS and x.dtype != torch.bool and not x.is_floating_point():
            _check_size(name, x)
            tensors[name] = x.to(torch.int32)
        if autocast and name in CAST and x.is_floating_point() and x.dtype != torch.float64:
            tensors[name] = x.to(torch.get_autocast_dtype(device.type))
        # Without this the result would silently have no tangent.
        if not _is_traced() and forward_ad.unpack_dual(x).tangent is not None:
            raise ConfigError(
                f"{name} has a tangent, but cope_jax.torch has no forward mode: use backward() or torch.autograd.grad"
            )
    wrt = [
        number
        for number, x in enumerate(tensors.values())
        if torch.is_grad_enabled() and x.requires_grad
    ]
    key = _key(hook, encoding.spec, tuple(tensors), options, wrt)
    return run(list(tensors.values()), key)[0]


def _check_size(name: str, x: Tensor) -> None:
    """Refuses whole numbers of over 32 bits, where a look at them costs little."""
    if x.dtype == torch.int64 and x.device.type == "cpu" and not _is_traced() and x.numel():
        low, high = int(x.min()), int(x.max())
        if not -(2**31) <= low <= high < 2**31:
            raise ConfigError(f"{name} must fit into 32 bits, got {low} to {high}")


def _is_traced() -> bool:
    """Returns whether torch.compile reads this code, so that tensors have no values."""
    return torch.compiler.is_compiling()


def _fixed(name: str, value: Any) -> Any:
    """Returns an option as JSON has it; torch.compile makes a symbolic number constant when a set
    contains it.
    """
    if isinstance(value, dict):
        return {key: _fixed(key, x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fixed(name, x) for x in value]
    if isinstance(value, Tensor):
        learned = "; multiply q by a learned scale" if name == "scale" else ""
        raise ConfigError(
            f"{name} must not be a tensor, as it gets no gradient: pass {name}.item(){learned}"
        )
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (int, float)):
        return {value}.pop()
    return value if value is None or isinstance(value, str) else checked(value, float, name)


@torch.compiler.assume_constant_result
def _key(*call: Any) -> str:
    """Returns a call as text; the arguments are those of `torch_program.Call`."""
    return json.dumps(call)
