"""The attention function and the mask function of transformers' interfaces, on top of `attend`."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cope_jax.errors import ConfigError

SMALLEST = 64
"""Lengths become multiples of at least this, so that few shapes are compiled."""


def attention(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the encoding of a layer.

    Args:
      layer: an attention layer with a submodule `positions`.
      query: `[B, H, L, K]`.
      key: `[B, G, M, K]`; a cache may have room for more keys.
      value: `[B, G, M, K]`.
      attention_mask: what `mask` returned.
      scaling: what multiplies q·k.
      dropout: the rate of dropout.
      sliding_window: the number of keys that a query sees.
      softcap: the largest size of a content logit.
      **options: other arguments of attention in transformers.

    Returns:
      (out_BLHK, None).
    """
    if not hasattr(layer, "positions"):
        raise ConfigError(
            f"this {type(layer).__name__} has no encoding: call cope_jax.torch.add_positions(model, …) first"
        )
    if options.get("s_aux") is not None:
        raise ConfigError("add_positions does not support learned sinks of a model: choose another")
    q_BLHK, k_BMGK, v_BMGK = (x.transpose(1, 2) for x in (query, key, value))
    x_BMD = layer.__dict__.pop("positions_input", None)  # not kept: it has its graph
    if attention_mask is not None:
        end = attention_mask.shape[-1]
        k_BMGK, v_BMGK = k_BMGK[:, :end], v_BMGK[:, :end]
    length, keys = q_BLHK.shape[1], k_BMGK.shape[1]
    if x_BMD is not None and length != keys:
        raise ConfigError(
            "this encoding reads the input of the layer, which the cache does not keep: pass use_cache=False"
        )
    if length != keys:
        _check_cache(layer.positions_facts, length, keys, sliding_window, attention_mask)
    given: dict[str, Any] = {"window": sliding_window, "logits_soft_cap": softcap}
    if scaling is not None and not math.isclose(scaling, query.shape[-1] ** -0.5):
        given["scale"] = scaling
    more = 0
    if attention_mask is not None and attention_mask.ndim == 4:
        if attention_mask.dtype != torch.bool:
            raise ConfigError(
                f"a mask of four axes must be boolean, True where a query may see a key, got {attention_mask.dtype}: "
                "pass mask == 0 if hidden keys have large negative numbers"
            )
        if layer.positions_facts.reads_hidden:
            raise ConfigError(
                "this encoding reads tokens that a mask of four axes hides: pass a mask [batch, tokens], and neither "
                "packed documents nor a static cache"
            )
        given |= {"mask": attention_mask, "causal": False}
    else:
        more = rounded(keys) - keys
        if more:
            before = (0, 0, 0, 0, more, 0)
            k_BMGK, v_BMGK = pad(k_BMGK, before), pad(v_BMGK, before)
            q_BLHK = pad(q_BLHK, before) if length == keys else q_BLHK
            x_BMD = x_BMD if x_BMD is None else pad(x_BMD, before[2:])
        if more or attention_mask is not None:
            given |= _seen(attention_mask, more, q_BLHK, k_BMGK)
    out_BLHK = layer.positions(
        q_BLHK, k_BMGK, v_BMGK, x=x_BMD, dropout_rate=float(dropout), **given
    )
    return out_BLHK[:, q_BLHK.shape[1] - length :], None


def _check_cache(
    facts: Any, length: int, keys: int, window: int | None, mask: Tensor | None
) -> None:
    """Refuses encodings that need what a cache does not keep."""
    if facts.reads_queries:
        raise ConfigError(
            "this encoding reads earlier queries, which the cache does not keep: pass use_cache=False"
        )
    cropped = window is not None and keys >= window - 1 + length
    unknown = facts.absolute and mask is not None and mask.ndim == 4
    if cropped and (facts.remembers or unknown):
        raise ConfigError(
            f"this encoding reads {'all earlier tokens' if facts.remembers else 'true positions'}, but the cache keeps "
            f"only the window of {window} tokens: pass use_cache=False"
        )


def _seen(count_BM: Tensor | None, more: int, q_BLHK: Tensor, k_BMGK: Tensor) -> dict[str, Any]:
    """Returns the positions and segments of queries and keys: hidden tokens are a segment of their
    own, and positions count the others.

    `more` tokens were put before the first.
    """
    length, (batch, keys) = q_BLHK.shape[1], k_BMGK.shape[:2]
    if count_BM is None:
        count_BM = _counts(batch, 0, keys - more, k_BMGK.device)
    count_BM = pad(count_BM, (more, 0))
    ids_BM, positions_BM = (count_BM > 0).to(torch.int32), (count_BM - 1).clamp(min=0)
    return {
        **{"k_positions": positions_BM, "q_positions": positions_BM[:, -length:]},
        **{"k_segment_ids": ids_BM, "q_segment_ids": ids_BM[:, -length:]},
    }


def mask(
    batch_size: int,
    kv_length: int,
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    cache_position: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Returns what `attention` gets as its mask, for the keys up to the last query.

    Args:
      batch_size: B.
      kv_length: the number of keys, or the room in a cache.
      q_length: L, the number of queries.
      q_offset: the index of the first query.
      kv_offset: the index of the first key.
      attention_mask: `[B, all tokens]`, False for padding.
      allow_is_causal_skip: False if more than causality, a window and padding hides keys.
      cache_position: indices of the queries, in transformers 4.
      **options: other arguments of a mask function.

    Returns:
      None if causality and the window say all; integers `[B, M]`, 0 for padding and else the number
      of tokens up to this; or `[B, 1, L, M]`, True where a query may see a key.
    """
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    end = int(q_offset) + q_length - kv_offset
    if not allow_is_causal_skip:
        from transformers.masking_utils import sdpa_mask

        queries: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset}
        if cache_position is not None:
            queries = {"cache_position": cache_position}
        given: dict[str, Any] = {
            "batch_size": batch_size,
            "kv_length": kv_length,
            "kv_offset": kv_offset,
        }
        given |= {"attention_mask": attention_mask, "allow_is_causal_skip": False}
        return sdpa_mask(**given, **queries, **options)[..., :end]
    whole = end == kv_length and not kv_offset
    if attention_mask is None:
        device = options.get("device")
        return None if whole else _counts(batch_size, kv_offset, end, device)
    seen_BM = attention_mask[:, : kv_offset + end].bool()
    seen_BM = pad(seen_BM, (0, kv_offset + end - seen_BM.shape[1]))
    everything = not torch.compiler.is_compiling() and bool(seen_BM.all())
    count_BM = seen_BM.cumsum(1, dtype=torch.int32) * seen_BM
    return None if everything and whole else count_BM[:, kv_offset:]


def _counts(batch: int, before: int, length: int, device: Any) -> Tensor:
    """Returns the number of tokens up to each, with `before` tokens before the first."""
    counts = torch.arange(before + 1, before + length + 1, dtype=torch.int32, device=device)
    return counts.expand(batch, length)


def rounded(length: int) -> int:
    """Returns a number of tokens rounded up: to 64, then in four steps until it doubles.

    >>> [rounded(length) for length in (1, 64, 65, 300, 1000, 1025)]
    [64, 64, 128, 320, 1024, 1280]
    """
    step = max(SMALLEST, 1 << max(0, length - 1).bit_length() >> 3)
    return -(-length // step) * step
