"""Encodings in which each token has a term of its own, by their papers, one pair at a time."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from tests.oracle.rules import (
    Params,
    Rule,
    Sizes,
    Token,
    Vector,
    log_sigmoid,
    sigmoid,
    softplus,
    turned,
)


def sum_after(numbers: Sequence[float], j: int) -> float:
    """Σ over the keys after j, the query's own last."""
    total = 0.0
    for number in numbers[j + 1 :]:
        total += number
    return total


def fox(
    params: Params,
    sizes: Sizes,
    gate: str = "token",
    bias: float = 0.0,
    stddev: float = 0.02,
    longest: float = 1024.0,
    prune: float | None = None,
) -> Rule:
    """Σ_{l=j+1..i} log f_l, f = σ(w_h·x + b_h) or σ(b_h): tokens after the key up to the query."""
    del bias, stddev, longest, prune

    def added(head, q, token, keys):
        del q, token
        forget = [
            log_sigmoid(
                float(params["bias"][head])
                + (float(key.x[-1] @ params["kernel"][:, head]) if gate == "token" else 0)
            )
            for key in keys
        ]
        return [sum_after(forget, j) for j in range(len(keys))]

    return Rule(added=added)


def cable(params: Params, sizes: Sizes, form: str = "paper", stddev: float = 0.02) -> Rule:
    """−softplus(w_s·x_i) Σ_{l=j+1..i} relu(w_c·x_l), or b_i − b_j, b = cumsum(−softplus(w·x+β))."""
    del sizes, stddev

    def added(head, q, token, keys):
        del q
        steps = [float(key.x[-1] @ params["step_kernel"][:, head]) for key in keys]
        if form == "code":
            b = np.cumsum([-softplus(step + float(params["step_bias"][head])) for step in steps])
            return [float(b[-1] - b[j]) for j in range(len(keys))]
        slope = softplus(float(token.x[-1] @ params["slope_kernel"][:, head]))
        return [-slope * sum_after([max(step, 0.0) for step in steps], j) for j in range(len(keys))]

    return Rule(added=added)


def grape_additive(params: Params, sizes: Sizes, gate: str = "key") -> Rule:
    """−2^(−8(h+1)/H) softplus(ω_h) |i−j| softplus(u_h·k_j/(|u_h| √K)), or of q_i."""

    def added(head, q, token, keys):
        u = params["direction"][head]
        # For powers of two.
        slope = 2 ** (-8 * (head + 1) / sizes.heads) * softplus(float(params["rate"][head]))
        length = math.sqrt(sum(float(entry) ** 2 for entry in u) * sizes.head_dim)
        return [
            -slope
            * abs(token.position - key.position)
            * softplus(float(u @ (q if gate == "query" else key.k)) / length)
            for key in keys
        ]

    return Rule(added=added)


def turns(angles: Callable[[Token], Sequence[float]], values: bool) -> Rule:
    """Turns q and k by the angles of their token, and values by the key's less the query's."""

    def carried(value, key, query):
        pairs = zip(angles(key), angles(query), strict=True)
        return turned(value, [of_key - of_query for of_key, of_query in pairs])

    def rotate(vector, token):
        return turned(vector, angles(token))

    return Rule(rotate=rotate, carried=carried if values else None)


def turning(
    step: Callable[[Vector, int], Sequence[float]], values: bool, exclusive: bool = False
) -> Rule:
    """Turns by the sum of `step(x_l, group)` over the tokens l up to the own one, or before it."""

    def angles(token):
        sums = [0.0] * len(step(token.x[-1], token.group))
        for x in list(token.x[:-1] if exclusive else token.x):
            sums = [angle + turn for angle, turn in zip(sums, step(x, token.group), strict=True)]
        return sums

    return turns(angles, values)


def carope(params: Params, sizes: Sizes, values: bool = False, stddev: float = 0.02) -> Rule:
    """Angle c of C = K/2: Σ f(x_l)^c, c from 1, f = 1/(softplus(x·w) + 1)."""
    del stddev

    def step(x, group):
        f = 1 / (softplus(float(x @ params["kernel"][:, group])) + 1)
        return [f**c for c in range(1, sizes.head_dim // 2 + 1)]

    return turning(step, values)


def grape(
    params: Params,
    sizes: Sizes,
    values: bool = False,
    base: float = 10000.0,
    step: float = 1e-3,
    per_head: bool = False,
) -> Rule:
    """Angle c: θ_c Σ_{l<t} softplus(w·x_l + b), θ_c = e^parameter."""
    del base, step

    def increment(x, group):
        column = group if per_head else 0
        omega = softplus(float(x @ params["kernel"][:, column]) + float(params["bias"][column]))
        return [omega * math.exp(params["log_frequencies"][c]) for c in range(sizes.head_dim // 2)]

    return turning(increment, values, exclusive=True)


def mapformer(
    params: Params,
    sizes: Sizes,
    values: bool = False,
    rank: int = 2,
    world: float = 64.0,
    fastest: float = 2 * math.pi,
) -> Rule:
    """Angle c: ω_c Σ_{l≤t} (W_out W_in x_l)_c."""
    del world, fastest
    assert params["into"].shape == (sizes.model_dim, rank)

    def step(x, group):
        del group
        coordinates = x @ params["into"] @ params["out"]
        return [
            float(params["frequencies"][c] * coordinates[c]) for c in range(sizes.head_dim // 2)
        ]

    return turning(step, values)


def darope(
    params: Params,
    sizes: Sizes,
    base: float = 500000.0,
    length: int | None = None,
    alpha: float = 0.5,
    stddev: float = 0.1,
) -> Rule:
    """Fast bands turn by position; slow ones by L σ(w·x + α logit((m + ½)/L)), clipped."""
    del alpha, stddev
    size = sizes.max_length if length is None else length

    def rotate(vector, token):
        least = Fraction(1, 10**6)  # exact, because 1 − 10⁻⁶ in float64 has ten digits less
        share = min(max((Fraction(token.position) + Fraction(1, 2)) / size, least), 1 - least)
        gate = float(token.x[-1] @ params["kernel"][:, token.group])
        position = size * sigmoid(
            gate + float(params["alpha"][token.group]) * math.log(share / (1 - share))
        )
        angles = []
        for c in range(sizes.head_dim // 2):
            theta = base ** (-2 * c / sizes.head_dim)
            angles.append((token.position if theta >= 2 * math.pi / size else position) * theta)
        return turned(vector, angles)

    return Rule(rotate=rotate)


def repo(
    params: Params,
    sizes: Sizes,
    base: float = 500000.0,
    hidden: int | None = None,
    stddev: float = 0.02,
    position: str = "chosen",
) -> Rule:
    """Angle c: z base^(−2c/K), z = w·(SiLU(W_g x) ⊙ (W_c x)), or the position."""
    del stddev
    width = hidden or sizes.model_dim // 8

    def rotate(vector, token):
        z = float(token.position)
        if position == "chosen":
            z = 0.0
            for n in range(width):
                gate = float(token.x[-1] @ params["gate"][:, n])
                content = float(token.x[-1] @ params["content"][:, n])
                z += gate * sigmoid(gate) * content * float(params["out"][n, token.group])
        return turned(
            vector, [z * base ** (-2 * c / sizes.head_dim) for c in range(sizes.head_dim // 2)]
        )

    return Rule(rotate=rotate)


def pope(params: Params, sizes: Sizes, base: float = 10000.0, phase: str = "zero") -> Rule:
    """Σ_c softplus(q_c) softplus(k_c) cos((j − i) θ_c + δ_c), θ_c = base^(−c/K), as a product of 2K
    features.

    No token context, but its keys differ from its queries.
    """
    del phase
    width = sizes.head_dim

    def rotate(vector, token):
        out = np.zeros(2 * width)
        for c in range(width):
            angle = token.position * base ** (-c / width)
            if token.is_key:
                angle += min(max(float(params["phase"][token.group, c]), -2 * math.pi), 0.0)
            out[c] = softplus(vector[c]) * math.cos(angle)
            out[width + c] = softplus(vector[c]) * math.sin(angle)
        return out

    return Rule(rotate=rotate)


def convolved(rows: Sequence[Vector], kernel: Vector) -> Vector:
    """The last row's convolution of channels over the last rows; kernel[-1] is its coefficient."""
    total = np.zeros_like(rows[-1])
    for lag in range(min(len(kernel), len(rows))):
        total = total + kernel[len(kernel) - 1 - lag] * rows[len(rows) - 1 - lag]
    return total


def selective_rope(
    params: Params,
    sizes: Sizes,
    values: bool = False,
    rank: int = 16,
    width: int = 4,
    silu: bool = False,
    bias: bool = False,
    gate: bool = False,
    temperature: str = "powers",
    theta: float = 500000.0,
    largest: float = 1.0,
) -> Rule:
    """Angle c: θ_c Σ_{l≤t} conv(W_2 W_1 x̂)_c, with its options; x̂ has unit slices.

    With rank 0, φ_c = s_g (w_c/|w_c|)·(the slices of the group's heads).
    """
    count = sizes.head_dim // 2
    spaced = [theta * math.pi * c / max(count - 1, 1) for c in range(count)]
    raw = (
        [math.sqrt((1 - math.cos(a)) / (1 + math.cos(a))) for a in spaced]
        if temperature == "rfa"
        else []
    )
    rates = [
        largest * raw[c] / max(raw) if raw else largest * theta ** (-2 * c / sizes.head_dim)
        for c in range(count)
    ]

    def normalised(x):
        slices = np.split(x, sizes.heads)
        return np.concatenate([piece / math.sqrt(float(piece @ piece) + 1e-6) for piece in slices])

    def projected(unit, group):
        if rank:
            assert params["into"].shape == (sizes.model_dim, rank)
            return np.tensordot(unit @ params["into"], params["out"][:, group], 1)
        columns = params["out"][group]  # of the inputs of the group's heads
        slices = unit[group * len(columns) : (group + 1) * len(columns)]
        phi = np.zeros(count)
        for c in range(count):
            length = math.sqrt(float(columns[:, c] @ columns[:, c]) + 1e-12)
            phi[c] = params["out_scale"][group] * float(columns[:, c] @ slices) / length
        return phi

    def angles(token):
        sums, rows = [0.0] * count, []
        for x in token.x:
            unit = normalised(x)
            rows.append(projected(unit, token.group))
            if width:
                phi = convolved(rows, params["convolution"][:, token.group])
            else:
                phi = rows[-1] - (rows[-2] if len(rows) > 1 else 0)
            for c in range(count):
                step = float(phi[c]) * sigmoid(float(phi[c])) if silu else float(phi[c])
                step += math.exp(params["log_bias"][token.group, c]) if bias else 0.0
                if gate:
                    logit = (
                        unit @ params["gate_kernel"][:, token.group]
                        + params["gate_bias"][token.group]
                    )
                    step *= sigmoid(float(logit))
                sums[c] += rates[c] * step
        return sums

    return turns(angles, values)


def path(
    params: Params,
    sizes: Sizes,
    rank: int = 32,
    width: int = 3,
    forget: bool = False,
    bias: float = 0.0,
) -> Rule:
    """From the nearest key to the farthest: the logit is k·c/√K, then c loses β w (w·c)."""
    del rank, width, bias

    def reflection(rows, group):
        raw = [np.tensordot(x @ params["into"], params["out"][:, group], 1) for x in rows]
        mixed = convolved(raw, params["convolution"][:, group])
        w = np.array([unit * sigmoid(float(unit)) for unit in mixed])
        beta = 2 * sigmoid(
            float(rows[-1] @ params["beta_kernel"][:, group]) + float(params["beta_bias"][group])
        )
        return w / math.sqrt(float(w @ w) + 1e-6), beta

    def added(head, q, token, keys):
        c, forgotten, added_terms = np.array(q), 0.0, []
        for key in reversed(keys):
            added_terms.append(float(key.k @ c) / math.sqrt(sizes.head_dim) + forgotten - key.logit)
            w, beta = reflection(key.x, token.group)
            c = c - beta * w * float(w @ c)
            if forget:
                gate = key.x[-1] @ params["forget_kernel"][:, head] + params["forget_bias"][head]
                forgotten += log_sigmoid(float(gate))
        return added_terms[::-1]

    return Rule(added=added)


def wall(params: Params, sizes: Sizes, bias: float = 8.0, stddev: float = 0.02) -> Rule:
    """From the nearest key on: the logit is Σ_n q_n k_n e^{s_n}/√K, then s_n adds log f_n."""
    del bias, stddev

    def added(head, q, token, keys):
        fallen, added_terms = [0.0] * sizes.head_dim, []
        for key in reversed(keys):
            product = sum(q[n] * key.k[n] * math.exp(fallen[n]) for n in range(sizes.head_dim))
            added_terms.append(float(product) / math.sqrt(sizes.head_dim) - key.logit)
            for n in range(sizes.head_dim):
                gate = key.x[-1] @ params["kernel"][:, head, n] + params["bias"][head, n]
                fallen[n] += log_sigmoid(float(gate))
        return added_terms[::-1]

    return Rule(added=added)


TOKEN_RULES = {
    "grape_additive": grape_additive,
    "wall": wall,
    "selective_rope": selective_rope,
    "path": path,
    "fox": fox,
    "cable": cable,
    "carope": carope,
    "grape": grape,
    "mapformer": mapformer,
    "darope": darope,
    "repo": repo,
    "pope": pope,
}
