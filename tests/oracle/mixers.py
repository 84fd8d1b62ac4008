"""Recurrences with a matrix as state, one token at a time."""

import math
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def recurrence(
    q_LHK: Array,
    k_LHK: Array,
    v_LHV: Array,
    decay_LHK: Array | None,
    beta_LH: Array | None,
    segments: Sequence[int],
) -> Array:
    """S ← e^g S; S ← S + β k (v − Sᵀk)ᵀ, or S + k vᵀ; out = Sᵀ q/√K. Segments begin with S = 0."""
    (length, heads, width), out = q_LHK.shape, np.zeros(v_LHV.shape)
    for head in range(heads):
        state = np.zeros((width, v_LHV.shape[-1]))
        for t in range(length):
            if t and segments[t] != segments[t - 1]:
                state = np.zeros_like(state)
            k, v = k_LHK[t, head], v_LHV[t, head]
            if decay_LHK is not None:
                for c in range(width):
                    state[c] *= math.exp(decay_LHK[t, head, c % decay_LHK.shape[-1]])
            if beta_LH is not None:
                v = beta_LH[t, head] * (v - state.T @ k)
            state = state + np.outer(k, v)
            out[t, head] = state.T @ q_LHK[t, head] / math.sqrt(width)
    return out
