"""The decoder-only transformer, one token, one layer and one head at a time."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tests.oracle.attention import attention
from tests.oracle.encodings import Rule, compose

Array = np.ndarray
# By path, such as "attention/query/kernel"; a bias that is absent is 0.
Params = Mapping[str, Array]


class Choices(NamedTuple):
    """The choices of a block, besides the parameters."""

    heads: int
    kv_heads: int
    head_dim: int
    activation: str = "gelu"
    norm: str = "layer"
    norm_position: str = "pre"
    tape: bool = False  # each layer changes the positions e_HK of the tokens


def decoder(
    tokens: Sequence[int],
    params: Params,
    layers: Sequence[Params],
    choices: Choices,
    shared: Rule,
    per_layer: Sequence[Rule],
    positions: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
) -> Array:
    """The logits `[L, V]` of one sequence: E[token] through the blocks, normed, times W_out, or
    Eᵀ/√D if tied.

    Args:
      tokens: the sequence.
      params: "embedding/embedding", "norm/norm/…" where the norms come first, and "out/kernel"
        unless tied.
      layers: the parameters of each block.
      choices: what the blocks are made of.
      shared: the encoding that all layers have together; it alone may act on the embeddings.
      per_layer: the encoding of each layer.
      positions: None: 0, 1, 2, …
      segments: tokens meet only within one; None: a single one.
    """
    positions = range(len(tokens)) if positions is None else positions
    table = params["embedding/embedding"]
    x = [
        shared.embed(table[token], int(position))
        for token, position in zip(tokens, positions, strict=True)
    ]
    e = (
        [
            np.stack([angles_of(position, choices.head_dim)] * choices.heads)
            for position in positions
        ]
        if choices.tape
        else None
    )
    for layer, rule in zip(layers, per_layer, strict=True):
        x, e = block(x, e, layer, choices, compose([shared, rule]), positions, segments)
    if choices.norm_position == "pre":
        x = normalise(x, params, "norm", choices.norm)
    out = params.get("out/kernel", table.T / math.sqrt(table.shape[1]))
    return np.stack([row @ out for row in x])


def angles_of(position: int, width: int) -> Array:
    """The complex numbers that rotate RoPE's pairs at a position, their real parts first."""
    turns = [
        complex(math.cos(angle), math.sin(angle))
        for angle in (position * 10_000 ** (-2 * pair / width) for pair in range(width // 2))
    ]
    return np.array([turn.real for turn in turns] + [turn.imag for turn in turns])


def turned(x_LHK: Array, e: Sequence[Array]) -> Array:
    """Each pair (c, c + K/2) times the complex number of the token's position."""
    half = x_LHK.shape[2] // 2
    out = np.zeros_like(x_LHK)
    for i, (x_HK, e_HK) in enumerate(zip(x_LHK, e, strict=True)):
        for head in range(len(x_HK)):
            for c in range(half):
                y = complex(x_HK[head, c], x_HK[head, c + half]) * complex(
                    e_HK[head, c], e_HK[head, c + half]
                )
                out[i, head, c], out[i, head, c + half] = y.real, y.imag
    return out


def moved(
    e: Sequence[Array], attended: Sequence[Array], fed: Sequence[Array], params: Params
) -> list[Array]:
    """Positions after a block: e ← e + M (A e), then e ← e + W_down (silu(W_token f) ⊙ W_up e)."""
    result = []
    for e_HK, a_HK, f_D in zip(e, attended, fed, strict=True):
        first = e_HK + params["mix_HH"] @ a_HK
        gates = [g / (1 + math.exp(-g)) for g in f_D @ params["token_DS"]]
        units = [gate * row for gate, row in zip(gates, params["up_HS"].T @ first, strict=True)]
        result.append(first + params["down_SH"].T @ np.stack(units))
    return result


def block(
    x: Sequence[Array],
    e: Sequence[Array] | None,
    params: Params,
    choices: Choices,
    rule: Rule,
    positions: Sequence[int],
    segments: Sequence[int] | None = None,
) -> tuple[list[Array], list[Array] | None]:
    """x + f(norm(x)), or norm(x + f(x)), of attention, then feed-forward. TAPE changes e too."""
    pre = choices.norm_position == "pre"
    normed = normalise(x, params, "attention_norm", choices.norm) if pre else x
    attended, sums = self_attention(normed, e, params, choices, rule, positions, segments)
    x = [row + added for row, added in zip(x, attended, strict=True)]
    x = x if pre else normalise(x, params, "attention_norm", choices.norm)
    normed = normalise(x, params, "mlp_norm", choices.norm) if pre else x
    fed = [feed_forward(at, params, choices.activation) for at in normed]
    x = [row + added for row, added in zip(x, fed, strict=True)]
    return x if pre else normalise(x, params, "mlp_norm", choices.norm), e and moved(
        e, sums, fed, params
    )


def self_attention(
    x: Sequence[Array],
    e: Sequence[Array] | None,
    params: Params,
    choices: Choices,
    rule: Rule,
    positions: Sequence[int],
    segments: Sequence[int] | None = None,
) -> tuple[list[Array], list[Array]]:
    """(W_o attend(W_q x, W_k x, W_v x), the same sums of positions)."""
    heads = {"query": choices.heads, "key": choices.kv_heads, "value": choices.kv_heads}
    q, k, v = (
        np.stack(
            [linear(row, params, f"attention/{name}").reshape(count, choices.head_dim) for row in x]
        )
        for name, count in heads.items()
    )
    if e:
        q, k = turned(q, e), turned(k, e)

    def sums(values: Array) -> Array:
        return attention(
            q,
            k,
            values,
            rule,
            x_MD=np.stack(x),
            q_positions=positions,
            k_positions=positions,
            q_segments=segments,
            k_segments=segments,
        )

    out = [linear(out_HK.reshape(-1), params, "attention/out") for out_HK in sums(v)]
    return out, list(sums(np.stack(e))) if e else []


def feed_forward(x: Array, params: Params, activation: str) -> Array:
    """W_out f(W_in x), or W_out (silu(W_gate x) · W_in x)."""
    inner = linear(x, params, "mlp/inner")
    if activation == "swiglu":
        gate = linear(x, params, "mlp/gate")
        hidden = [unit * g / (1 + math.exp(-g)) for unit, g in zip(inner, gate, strict=True)]
    else:
        hidden = [{"relu": relu, "gelu": gelu}[activation](unit) for unit in inner]
    return linear(np.array(hidden), params, "mlp/outer")


def relu(x: float) -> float:
    """max(x, 0)."""
    return max(x, 0.0)


def gelu(x: float) -> float:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), the approximation that GPT-2 uses."""
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(x: Array, params: Params, name: str) -> Array:
    """W x + b of one token."""
    return x @ params[f"{name}/kernel"] + params.get(f"{name}/bias", 0.0)


def normalise(
    x: Sequence[Array], params: Params, name: str, kind: str, epsilon: float = 1e-6
) -> list[Array]:
    """Each token less its mean, over its standard deviation, or over its root mean square."""
    scale, bias = params[f"{name}/norm/scale"], params.get(f"{name}/norm/bias", 0.0)
    result = []
    for row in x:
        centred = row - sum(row) / len(row) if kind == "layer" else row
        square = sum(value**2 for value in centred) / len(row)
        result.append(centred / math.sqrt(square + epsilon) * scale + bias)
    return result
