"""Recurrent layers in NumPy, a step and a sequence at a time."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def tanh_layer(x, w_x, w_h, b, h):
    """(states of one sequence `[L, N]`, the last one)."""
    states = []
    for x_t in x:
        h = np.tanh(x_t @ w_x + h @ w_h + b)
        states.append(h)
    return np.array(states).reshape(-1, len(b)), (h,)


def lstm_layer(
    x, w_x, w_h, b, c, h, *, w_p=None, cell_clip=np.inf, projection_clip=np.inf, forget_bias=0.0
):
    """(outputs of a sequence, (last cell, last output)); W and b have gates i, f, g, o."""
    n, outputs = len(c), []
    for x_t in x:
        z = x_t @ w_x + h @ w_h + b
        i, f, g, o = z[:n], z[n : 2 * n], z[2 * n : 3 * n], z[3 * n :]
        c = sigmoid(f + forget_bias) * c + sigmoid(i) * np.tanh(g)
        c = np.minimum(np.maximum(c, -cell_clip), cell_clip)
        h = sigmoid(o) * np.tanh(c)
        if w_p is not None:
            h = np.minimum(np.maximum(h @ w_p, -projection_clip), projection_clip)
        outputs.append(h)
    return np.array(outputs).reshape(-1, len(h)), (c, h)


def batch(layer, x, lengths, carry, *, reverse=False):
    """A layer, (x of a sequence, its carry) → (outputs, carry), over real tokens of each row."""
    rows, lasts = [], []
    for row, length in enumerate(lengths):
        real = x[row, :length]
        y, last = layer(real[::-1] if reverse else real, *(state[row] for state in carry))
        y = y[::-1] if reverse else y
        rows.append(np.concatenate([y, np.zeros((x.shape[1] - length, y.shape[1]))]))
        lasts.append(last)
    return np.array(rows), tuple(np.array(states) for states in zip(*lasts, strict=True))


def cross_entropy(logits, target):
    return -np.log(softmax(logits)[target])
