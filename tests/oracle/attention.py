"""Softmax attention, one query, head and key at a time; and CoPE's gradients written out."""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracle.rules import Key, Rule, Token, softmax

Array = np.ndarray


def visible(
    i: int,
    j: int,
    length: int,
    keys: int,
    causal: bool = True,
    window: int | None = None,
    q_segments: Sequence[int] | None = None,
    k_segments: Sequence[int] | None = None,
    mask: Array | None = None,
) -> bool:
    """True if query i of `length` sees key j of `keys`; the last query is at the last key."""
    if mask is not None and not mask[i, j]:
        return False
    distance = i + keys - length - j
    if causal and distance < 0:
        return False
    if window is not None and abs(distance) >= window:
        return False
    return q_segments is None or k_segments is None or q_segments[i] == k_segments[j]


def first_of_segment(j: int, segments: Sequence[int] | None) -> int:
    """The first key of the run of keys, up to key j, that are of one segment."""
    first = j
    while first > 0 and (segments is None or segments[first - 1] == segments[j]):
        first -= 1
    return first


def attention(
    q_LHK: Array,
    k_MGK: Array,
    v_MGK: Array,
    rule: Rule,
    *,
    x_MD: Array | None = None,
    q_positions: Sequence[float] | None = None,
    k_positions: Sequence[float] | None = None,
    q_segments: Sequence[int] | None = None,
    k_segments: Sequence[int] | None = None,
    causal: bool = True,
    window: int | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Array:
    """out_i = Σ_j softmax_j(q_i·k_j/√K + the encoding's) v_j; 0 if no key is seen. One example.

    `bias`, `[H, L, M]`, is added to q_i·k_j/√K, or to q_i·k_j·scale; then the sum becomes soft_cap·tanh(sum/soft_cap).
    """
    (length, heads, width), (keys, groups, _) = q_LHK.shape, k_MGK.shape
    k_positions = range(keys) if k_positions is None else np.asarray(k_positions).tolist()
    q_positions = (
        range(keys - length, keys) if q_positions is None else np.asarray(q_positions).tolist()
    )
    x = np.zeros((keys, 0)) if x_MD is None else x_MD
    since = [x[first_of_segment(j, k_segments) : j + 1] for j in range(keys)]
    rules = causal, window, q_segments, k_segments, mask
    seen = [[j for j in range(keys) if visible(i, j, length, keys, *rules)] for i in range(length)]
    key_tokens = [
        [Token(k_positions[j], since[j], group, True) for j in range(keys)]
        for group in range(groups)
    ]
    rotated_k = [
        [rule.rotate(k_MGK[j, group], key_tokens[group][j]) for j in range(keys)]
        for group in range(groups)
    ]
    tokens, logits = {}, {}
    for head in range(heads):
        group = head // (heads // groups)
        for i in range(length):
            itself = i + keys - length  # the key of the query's own token
            tokens[head, i] = Token(
                q_positions[i], since[itself] if itself >= 0 else x[:0], group, False
            )
            q = rule.rotate(q_LHK[i, head], tokens[head, i])
            for j in seen[i]:
                logit = float(q @ rotated_k[group][j]) * (
                    1 / math.sqrt(width) if scale is None else scale
                )
                logit += 0.0 if bias is None else float(bias[head, i, j])
                logits[head, i, j] = (
                    logit if soft_cap is None else soft_cap * math.tanh(logit / soft_cap)
                )
    hidden = [{} for _ in range(length)]
    if rule.hidden is not None:
        hidden = rule.hidden([{j: logits[0, i, j] for j in seen[i]} for i in range(length)])
    out_LHK = np.zeros((length, heads, v_MGK.shape[-1]))
    for head in range(heads):
        group = head // (heads // groups)
        for i in range(length):
            if not seen[i]:
                continue
            about = [
                Key(
                    logit=logits[head, i, j],
                    position=k_positions[j],
                    value=v_MGK[j, group],
                    x=since[j],
                    k=rotated_k[group][j],
                    logits=[logits[other, i, j] for other in range(heads)],
                    index=j,
                    own=j == i + keys - length,
                )
                for j in seen[i]
            ]
            added = rule.added(head, q_LHK[i, head], tokens[head, i], about)
            final = [
                key.logit + bias - hidden[i].get(key.index, 0.0)
                for key, bias in zip(about, added, strict=True)
            ]
            weights = softmax(final) if rule.weights is None else rule.weights(head, final, about)
            for j, weight in zip(seen[i], weights, strict=True):
                value = v_MGK[j, group]
                if rule.carried is not None:
                    value = rule.carried(value, key_tokens[group][j], tokens[head, i])
                out_LHK[i, head] += weight * value
            if rule.rest_to_own_value:
                out_LHK[i, head] += (1 - sum(weights)) * v_MGK[i + keys - length, group]
    return out_LHK


def cope_backward(
    q_LK: Array, k_MK: Array, v_MK: Array, e_NK: Array, dout_LK: Array, **mask
) -> tuple[Array, Array, Array, Array]:
    """Gradients of one head of CoPE (gates σ(q·k/√K), position logit unscaled) by its backward
    formulae.

    With A the attention, σ′_ij = z_i[⌈p⌉] − z_i[⌊p⌋], D_i = dO_i·O_i:
      dS_ij = A_ij (dO_i·v_j − D_i)             dp_ij = dS_ij σ′_ij 1[P_ij ≤ N−1]
      C_ij = Σ_{j′≤j} dp_ij′
      dL_ij = dS_ij + g_ij (1−g_ij) C_ij         dz_i[n] = Σ_j dS_ij max(0, 1−|p_ij−n|)
      dq_i = Σ_j dL_ij k_j/√K + Σ_n dz_i[n] e[n]     dk_j = Σ_i dL_ij q_i/√K
      dv_j = Σ_i A_ij dO_i                           de[n] = Σ_i dz_i[n] q_i

    Args:
      q_LK: queries of one head.
      k_MK: keys.
      v_MK: values.
      e_NK: the table of positions.
      dout_LK: the gradient of the output.
      **mask: which pairs exist, as for `visible`.

    Returns:
      (dq, dk, dv, de).
    """
    (length, width), (keys, _), (size, _) = q_LK.shape, k_MK.shape, e_NK.shape
    s = 1 / math.sqrt(width)
    dq, dk, dv, de = (np.zeros(a.shape) for a in (q_LK, k_MK, v_MK, e_NK))
    for i in range(length):
        seen = [j for j in range(keys) if visible(i, j, length, keys, **mask)]
        if not seen:
            continue
        L = {j: s * float(q_LK[i] @ k_MK[j]) for j in seen}
        g = {j: 1 / (1 + math.exp(-L[j])) for j in seen}
        P = {j: sum(g[other] for other in seen if other >= j) for j in seen}
        p = {j: min(P[j], size - 1) for j in seen}
        z = [float(q_LK[i] @ e_NK[n]) for n in range(size)]
        w = {j: p[j] - math.floor(p[j]) for j in seen}
        pos = {j: (1 - w[j]) * z[math.floor(p[j])] + w[j] * z[math.ceil(p[j])] for j in seen}
        A = dict(zip(seen, softmax([L[j] + pos[j] for j in seen]), strict=True))
        D = float(dout_LK[i] @ sum(A[j] * v_MK[j] for j in seen))
        dS = {j: A[j] * (float(dout_LK[i] @ v_MK[j]) - D) for j in seen}
        dp = {
            j: dS[j] * (z[math.ceil(p[j])] - z[math.floor(p[j])]) if P[j] <= size - 1 else 0.0
            for j in seen
        }
        dz = [sum(dS[j] * max(0.0, 1 - abs(p[j] - n)) for j in seen) for n in range(size)]
        for j in seen:
            C = sum(dp[other] for other in seen if other <= j)
            dL = dS[j] + g[j] * (1 - g[j]) * C
            dq[i] += s * dL * k_MK[j]
            dk[j] += s * dL * q_LK[i]
            dv[j] += A[j] * dout_LK[i]
        for n in range(size):
            dq[i] += dz[n] * e_NK[n]
            de[n] += dz[n] * q_LK[i]
    return dq, dk, dv, de
