"""BERT, one token, one layer and one head at a time."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tests.oracle.attention import attention
from tests.oracle.encodings import Rule, compose

Array = np.ndarray
Params = Mapping[str, Array]  # by path, such as "encoder/pooler/kernel"


def encoder(
    tokens: Sequence[int],
    segments: Sequence[int],
    params: Params,
    layers: Sequence[Params],
    heads: int,
    shared: Rule,
    per_layer: Sequence[Rule],
    positions: Sequence[int] | None = None,
) -> list[Array]:
    """The states `[L, D]` of every layer, the embeddings first, of one sequence without padding.

    Args:
      tokens: pieces.
      segments: 0 or 1 for each.
      params: "words/embedding", "segments/embedding", "norm/norm/…".
      layers: the parameters of each block.
      heads: H.
      shared: the encoding that all layers have together; it alone may act on the embeddings.
      per_layer: the encoding of each layer.
      positions: None: 0, 1, 2, …
    """
    positions = range(len(tokens)) if positions is None else positions
    x = []
    for token, segment, position in zip(tokens, segments, positions, strict=True):
        row = params["words/embedding"][token] + params["segments/embedding"][segment]
        x.append(layer_norm(shared.embed(row, int(position)), params, "norm"))
    states = [np.stack(x)]
    for layer, rule in zip(layers, per_layer, strict=True):
        x = block(x, layer, heads, compose([shared, rule]), positions)
        states.append(np.stack(x))
    return states


def block(
    x: Sequence[Array], params: Params, heads: int, rule: Rule, positions: Sequence[int]
) -> list[Array]:
    """LN(x + attention(x)), then LN(x + mlp(x)); every token sees every token."""
    q, k, v = (
        np.stack([dense(row, params, f"attention/{name}").reshape(heads, -1) for row in x])
        for name in ("query", "key", "value")
    )
    out_LHK = attention(
        q, k, v, rule, x_MD=np.stack(x), q_positions=positions, k_positions=positions, causal=False
    )
    result = []
    for row, attended in zip(x, out_LHK, strict=True):
        row = layer_norm(
            row + dense(attended.reshape(-1), params, "attention/out"), params, "attention_norm"
        )
        hidden = np.array([gelu(unit) for unit in dense(row, params, "mlp/inner")])
        result.append(layer_norm(row + dense(hidden, params, "mlp/outer"), params, "mlp_norm"))
    return result


def pool(state: Array, params: Params) -> Array:
    """tanh(W x + b) of the first token."""
    return np.array([math.tanh(unit) for unit in dense(state, params, "encoder/pooler")])


def masked_logits(state: Array, params: Params) -> Array:
    """E LN(gelu(W x + b)) + c of one token."""
    hidden = np.array([gelu(unit) for unit in dense(state, params, "transform")])
    return (
        params["encoder/words/embedding"] @ layer_norm(hidden, params, "transform_norm")
        + params["bias_V"]
    )


def cross_entropy(logits: Array, target: int) -> float:
    """−log softmax(logits)[target]."""
    largest = max(logits)
    return largest + math.log(sum(math.exp(logit - largest) for logit in logits)) - logits[target]


def gelu(x: float) -> float:
    """x Φ(x), with the error function."""
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def dense(x: Array, params: Params, name: str) -> Array:
    """W x + b of one token."""
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def layer_norm(x: Array, params: Params, name: str, epsilon: float = 1e-12) -> Array:
    """(x − mean) / √(variance + ε), scaled and shifted."""
    centred = x - sum(x) / len(x)
    variance = sum(value**2 for value in centred) / len(x)
    return (
        centred / math.sqrt(variance + epsilon) * params[f"{name}/norm/scale"]
        + params[f"{name}/norm/bias"]
    )
