"""ELMo in NumPy: a word, a filter, a place, a step at a time."""

import numpy as np

from tests.oracle.recurrent import lstm_layer, sigmoid


def word(characters, table, filters, highways, projection):
    """The vector of one word.

    filters: (W of `[width, embed, number]`, b) each; highways: (W_carry, b_carry, W_transform,
    b_transform) each; projection: (W, b) or None.
    """
    if not any(characters):
        return np.zeros(projection[0].shape[1] if projection else sum(len(b) for _, b in filters))
    e = np.array([table[k] for k in characters])
    maxima = []
    for w, b in filters:
        for number in range(len(b)):
            values = []
            for start in range(len(e) - len(w) + 1):
                values.append(
                    sum(e[start + k] @ w[k, :, number] for k in range(len(w))) + b[number]
                )
            maxima.append(max(max(values), 0.0))
    x = np.array(maxima)
    for w_carry, b_carry, w_transform, b_transform in highways:
        gate = sigmoid(x @ w_carry + b_carry)
        x = gate * np.maximum(x @ w_transform + b_transform, 0) + (1 - gate) * x
    return x if projection is None else x @ projection[0] + projection[1]


def direction(x, layers, carry, clips, residual=True):
    """One sentence through one direction: (outputs of every layer, states); layers: (W_x, W_h, b,
    W_p) each; clips: of the cells and of the outputs.
    """
    outputs, lasts = [], []
    for number, (w_x, w_h, b, w_p) in enumerate(layers):
        y, last = lstm_layer(
            x,
            w_x,
            w_h,
            b,
            *carry[number],
            w_p=w_p,
            cell_clip=clips[0],
            projection_clip=clips[1],
            forget_bias=1.0,
        )
        x = y + x if residual and number else y
        outputs.append(x)
        lasts.append(last)
    return outputs, lasts


def bilm(x, forward, backward, carry, clips, residual=True):
    """All layers `[J, L, 2P]` of a sentence of vectors, and states, from (forward, backward)."""
    ahead, last = direction(x, forward, carry[0], clips, residual)
    back, first = direction(x[::-1], backward, carry[1], clips, residual)
    pairs = [(x, x), *((f, b[::-1]) for f, b in zip(ahead, back, strict=True))]
    return np.array([np.concatenate(pair, axis=1) for pair in pairs]), (last, first)
