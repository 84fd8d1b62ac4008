"""Every position encoding as its paper states it, one pair of query and key at a time.

`ORACLES[name](params, sizes, **options)` gives the `Rule` of an encoding. CoPE's equation numbers
are those of arXiv 2405.18719.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.pair_rules import PAIR_RULES
from tests.oracle.rules import Key, Params, Rule, Sizes, Vector, sigmoid, turned
from tests.oracle.rules import compose as compose
from tests.oracle.token_rules import TOKEN_RULES


def of_distance(bias: Callable[[int, Vector, int, int], float]) -> Rule:
    """The rule that adds bias(head, q, query position, key position) to each logit."""
    return Rule(
        added=lambda head, q, token, keys: [
            bias(head, q, token.position, key.position) for key in keys
        ]
    )


def none(params: Params, sizes: Sizes) -> Rule:
    """No encoding at all."""
    del params, sizes
    return Rule()


def learned(params: Params, sizes: Sizes) -> Rule:
    """x_i + table[i]."""
    assert params["table"].shape == (sizes.max_length, sizes.model_dim)

    def embed(x, position):
        if not 0 <= position < sizes.max_length:
            return np.full_like(x, np.nan)
        return x + params["table"][position]

    return Rule(embed=embed)


def sinusoidal(params: Params, sizes: Sizes, base: float = 10000.0) -> Rule:
    """Feature 2c is sin(i / base^(2c/D)), feature 2c+1 is cos of the same."""
    del params

    def embed(x, position):
        out = np.array(x)
        for feature in range(sizes.model_dim):
            angle = position / base ** (2 * (feature // 2) / sizes.model_dim)
            out[feature] += math.cos(angle) if feature % 2 else math.sin(angle)
        return out

    return Rule(embed=embed)


def relative(
    params: Params,
    sizes: Sizes,
    max_distance: int | None = None,
    beyond: str = "clip",
    scale_position_logits: bool = False,
    signed: bool = False,
) -> Rule:
    """q_i·P[i−j]; from max_distance on the last row again (clip), or nothing; P begins with the
    distance 0.

    Signed it begins with 1 − max_distance; else a later key is NaN.
    """
    size = sizes.max_length if max_distance is None else max_distance
    rows = {distance: row for row, distance in enumerate(range(1 - size if signed else 0, size))}
    assert params["table"].shape == (len(rows), sizes.head_dim)

    def bias(head, q, i, j):
        if j > i and not signed:
            return math.nan
        if abs(i - j) >= size and beyond == "nothing":
            return 0.0
        scale = 1 / math.sqrt(sizes.head_dim) if scale_position_logits else 1.0
        return scale * float(q @ params["table"][rows[min(max(i - j, min(rows)), max(rows))]])

    return of_distance(bias)


def stretched(frequency: float, llama3: tuple[float, float, float, float] | None) -> float:
    """A frequency of RoPE as Llama 3.1 changes it, by cases of its wavelength."""
    if llama3 is None:
        return frequency
    factor, low, high, length = llama3
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn_kept(
    c: int, frequency: float, rotated: int, base: float, yarn: Sequence[float], ramp: str
) -> float:
    """1 for the bands that YaRN leaves alone, 0 for those that it slows down by the factor."""
    _, length, slow, fast = (*yarn, 1.0, 32.0)[:4]
    if ramp == "turns":
        turns = length / (2 * math.pi / frequency)
        return min(max((turns - slow) / (fast - slow), 0.0), 1.0)

    def band(turns):  # the band that turns so often, as a real number
        return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(band(fast)), 0), min(math.ceil(band(slow)), rotated - 1)
    return 1 - min(max((c - low) / max(high - low, 0.001), 0.0), 1.0)


def rope(
    params: Params,
    sizes: Sizes,
    base: float = 10000.0,
    fraction: float = 1.0,
    bands: float = 1.0,
    longest: float | None = None,
    clip: int | None = None,
    decay: float | None = None,
    interpolation: float | None = None,
    ntk: float | None = None,
    yarn: Sequence[float] | None = None,
    yarn_ramp: str = "turns",
    longrope: Sequence[float] | None = None,
    llama3: tuple[float, float, float, float] | None = None,
    magnitude: float | None = None,
) -> Rule:
    """Turns the pair of features (c, c + r/2) by i·base^(−2c/r); r features turn."""
    del params
    rotated = 2 * math.floor(fraction * sizes.head_dim / 2)
    if magnitude is None:
        magnitude = 1.0 if yarn is None else 0.1 * math.log(yarn[0]) + 1
    trained_base = base
    if ntk is not None:
        base = base * ntk ** (rotated / (rotated - 2))

    def frequency(c):
        wavelength = 2 * math.pi * trained_base ** (2 * c / rotated)
        if c >= bands * rotated / 2 or (longest is not None and wavelength > longest):
            return 0.0
        theta = stretched(base ** (-2 * c / rotated), llama3)
        if yarn is not None:
            kept = yarn_kept(c, theta, rotated, base, yarn, yarn_ramp)
            theta = kept * theta + (1 - kept) * theta / yarn[0]
        if longrope is not None:
            theta = theta / longrope[c]
        if clip is not None:
            steps = max(c - (rotated // 2 - clip), 0)
            theta *= math.cos(math.pi * steps / (clip - 1) / 2) ** 2
        return theta

    def rotate(vector, token):
        position = token.position if interpolation is None else token.position / interpolation
        scale = []
        for c in range(rotated // 2):
            z = (2 * c + 0.4 * rotated) / (1.4 * rotated)
            power = 0.0 if decay is None else token.position / decay
            scale.append(magnitude * z ** (-power if token.is_key else power))
        return turned(vector, [position * frequency(c) for c in range(rotated // 2)], scale)

    return Rule(rotate=rotate)


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8(h+1)/H); else those of the power below H, then every other one of twice that power."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    finer = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(2 * power)]
    return slopes + finer[::2][: heads - power]


def alibi(params: Params, sizes: Sizes, slopes: Sequence[float] | None = None) -> Rule:
    """−m_h |i−j|."""
    del params
    m = alibi_slopes(sizes.heads) if slopes is None else slopes
    return of_distance(lambda head, q, i, j: -m[head] * abs(i - j))


def t5_bucket(distance: int, num_buckets: int, max_distance: int) -> int:
    """T5's causal bucket in whole numbers: n below half of the buckets, then ⌊log(n/half) /
    log(max/half) · rest⌋ more.

    >>> [t5_bucket(n, 8, 16) for n in (0, 3, 4, 5, 6, 8, 11, 12, 16, 99)]
    [0, 3, 4, 4, 5, 6, 6, 7, 7, 7]
    """
    half = num_buckets // 2
    rest = num_buckets - half
    if distance < half:
        return max(distance, 0)
    steps = 0  # the largest with (n/half)^rest >= (max/half)^steps
    while (
        steps < rest - 1
        and distance**rest * half ** (steps + 1) >= max_distance ** (steps + 1) * half**rest
    ):
        steps += 1
    return half + steps


def t5(
    params: Params,
    sizes: Sizes,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> Rule:
    """bias[bucket(i−j), h]; with two sides, keys after the query have the upper buckets."""
    assert params["table"].shape == (num_buckets, sizes.heads)
    if bidirectional:
        half = num_buckets // 2

        def bias(head, q, i, j):
            bucket = t5_bucket(abs(i - j), half, max_distance)
            return params["table"][half + bucket if j > i else bucket, head]

        return of_distance(bias)
    return of_distance(
        lambda head, q, i, j: params["table"][t5_bucket(i - j, num_buckets, max_distance), head]
    )


def kerple(params: Params, sizes: Sizes) -> Rule:
    """−r1_h log(1 + r2_h |i−j|), both r positive: the softplus of a parameter."""
    del sizes
    r1, r2 = (np.log1p(np.exp(params[name])) for name in ("r1", "r2"))
    return of_distance(lambda head, q, i, j: -r1[head] * math.log(1 + r2[head] * abs(i - j)))


def ssmax(params: Params, sizes: Sizes, scale: float = 0.168) -> Rule:
    """s_h log n times the content logit, n the number of tokens of the document up to the query."""
    del sizes, scale

    def added(head, q, token, keys):
        del q
        factor = float(params["scale"][head]) * math.log(len(token.x))
        return [(factor - 1) * key.logit for key in keys]

    return Rule(added=added)


def scale_invariant(params: Params, sizes: Sizes, tau: float = 10.0) -> Rule:
    """a L + m at distance t: the a ≥ 0 and m for which E e^(aL+m) = √e/(t/τ + 1) = E (aL+m)
    e^(aL+m), L normal.
    """
    del params, sizes

    def added(head, q, token, keys):
        del head, q
        added_terms = []
        for key in keys:
            share = math.log(math.sqrt(math.e) / (abs(token.position - key.position) / tau + 1))
            m = 2 * share - 1  # m + a²/2 = share, and m + a² = 1
            added_terms.append(math.sqrt(1 - m) * key.logit + m - key.logit)
        return added_terms

    return Rule(added=added)


def fire(params: Params, sizes: Sizes, hidden: int = 32, threshold: float = 512.0) -> Rule:
    """f(ψ(|i−j|) / ψ(max(|m|·threshold, i, j)))_h, ψ(x) = log(|c|x + 1), f a ReLU network."""
    w1, b1, w2, b2 = (
        params[name] for name in ("hidden_kernel", "hidden_bias", "out_kernel", "out_bias")
    )
    assert w1.shape == (hidden,) and w2.shape == (hidden, sizes.heads)

    def psi(x):
        return math.log(abs(float(params["c"])) * x + 1)

    def bias(head, q, i, j):
        ratio = psi(abs(i - j)) / psi(max(abs(float(params["threshold_scale"])) * threshold, i, j))
        total = b2[head]
        for unit in range(hidden):
            total += w2[unit, head] * max(w1[unit] * ratio + b1[unit], 0.0)
        return float(total)

    return of_distance(bias)


def cope_gates(
    params: Params, sizes: Sizes, gate: str, head: int, q: Vector, keys: Sequence[Key]
) -> list[float]:
    """Eq 3: g_ij = σ(q_i·k_j); or with separate keys, k = x W_g; or with values as keys."""
    if gate == "query_key":
        return [sigmoid(key.logit) for key in keys]
    group = head // (sizes.heads // sizes.kv_heads)
    gates = []
    for key in keys:
        gate_key = key.x[-1] @ params["gate_key"][:, group] if gate == "separate_key" else key.value
        gates.append(sigmoid(float(q @ gate_key) / math.sqrt(sizes.head_dim)))
    return gates


def cope_positions(gates: Sequence[float]) -> list[float]:
    """Eq 4: p_ij = Σ_{k=j..i} g_ik, the gates in the order of the keys."""
    return [sum(gates[j:]) for j in range(len(gates))]


def cope(
    params: Params,
    sizes: Sizes,
    npos_max: int = 64,
    gate: str = "query_key",
    position: str = "table",
    slope: float = 1.0,
    scale_position_logits: bool = False,
    hidden: int = 32,
) -> Rule:
    """Eq 3–6: contextual positions, and what they add to the logits of one query."""

    def embedding(p):
        if position == "mlp":
            units = [
                max(
                    float(params["hidden_kernel"][f]) * p / (npos_max - 1)
                    + float(params["hidden_bias"][f]),
                    0.0,
                )
                for f in range(hidden)
            ]
            return sum(unit * params["table"][f] for f, unit in enumerate(units))
        below, above = math.floor(p), math.ceil(p)
        # Eq 5.
        return (p - below) * params["table"][above] + (1 - p + below) * params["table"][below]

    def added(head, q, token, keys):
        del token
        positions = cope_positions(cope_gates(params, sizes, gate, head, q, keys))
        if position == "slope":
            return [-slope * 2 ** (-8 * head / sizes.heads) * p for p in positions]
        if position == "learned_slope":
            return [float(params["slopes"][head]) * p for p in positions]
        assert params["table"].shape == (hidden if position == "mlp" else npos_max, sizes.head_dim)
        scale = 1 / math.sqrt(sizes.head_dim) if scale_position_logits else 1.0
        logits = []
        for p in positions:
            if math.isnan(p):  # of an input that is NaN
                logits.append(p)
                continue
            logits.append(scale * float(q @ embedding(min(p, npos_max - 1))))  # p_max, Eq 6
        return logits

    return Rule(added=added)


def cope_two_sided(
    params: Params,
    sizes: Sizes,
    npos_max: int = 64,
    share_table: bool = False,
    scale_position_logits: bool = False,
) -> Rule:
    """Positions are sums of gates outward from the query, its gate included, a table a side."""
    left = params["tables"][0]
    right = params["tables"][0 if share_table else 1]
    assert params["tables"].shape == (1 if share_table else 2, npos_max, sizes.head_dim)

    def added(head, q, token, keys):
        del head
        gates = [sigmoid(key.logit) for key in keys]
        i, logits = token.position, []
        for key in keys:
            low, high = min(i, key.position), max(i, key.position)
            between = [
                gate
                for gate, other in zip(gates, keys, strict=True)
                if low <= other.position <= high
            ]
            p = min(sum(between), npos_max - 1)
            table = right if key.position > i else left
            below, above = math.floor(p), math.ceil(p)
            e = (p - below) * table[above] + (1 - p + below) * table[below]
            logits.append(
                float(q @ e) / (math.sqrt(sizes.head_dim) if scale_position_logits else 1.0)
            )
        return logits

    return Rule(added=added)


ORACLES: dict[str, Callable[..., Rule]] = {
    "none": none,
    "learned": learned,
    "sinusoidal": sinusoidal,
    "relative": relative,
    "rope": rope,
    "alibi": alibi,
    "t5": t5,
    "kerple": kerple,
    "ssmax": ssmax,
    "scale_invariant": scale_invariant,
    "fire": fire,
    "cope": cope,
    "cope_two_sided": cope_two_sided,
    **TOKEN_RULES,
    **PAIR_RULES,
}
