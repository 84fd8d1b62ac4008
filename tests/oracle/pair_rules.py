"""Encodings of query and key together, by their papers or code, one pair at a time."""

import math

from tests.oracle.rules import Params, Rule, Sizes, log_sigmoid, sigmoid, softmax


def stick_breaking(
    params: Params, sizes: Sizes, see_itself: bool = False, remainder: str = "zero"
) -> Rule:
    """a_ij = σ(s_ij) Π (1 − σ(s_il)) over nearer keys; by default without the query's token."""
    del params, sizes

    def weights(head, logits, keys):
        del head
        left, shares = 1.0, []
        for logit, key in zip(reversed(logits), reversed(keys), strict=True):
            share = sigmoid(logit) if see_itself or not key.own else 0.0
            shares.append(left * share)
            left -= left * share
        return shares[::-1]

    return Rule(weights=weights, rest_to_own_value=remainder == "own")


def tra(params: Params, sizes: Sizes) -> Rule:
    """Softmax over keys with s > 0 of s + δ · (number of such keys up to the query); 0 if none."""
    del sizes

    def added(head, q, token, keys):
        del q
        price = log_sigmoid(float(token.x[-1] @ params["kernel"][:, head] + params["bias"][head]))
        return [price * sum(other.logit > 0 for other in keys[j:]) for j in range(len(keys))]

    def weights(head, logits, keys):
        del head
        shares = [
            math.exp(logit) if key.logit > 0 else 0.0
            for logit, key in zip(logits, keys, strict=True)
        ]
        return [share / (sum(shares) or 1.0) for share in shares]

    return Rule(added=added, weights=weights)


def row_fox(params: Params, sizes: Sizes, gate: str = "separate", width: int = 8) -> Rule:
    """Σ_{l=j..i−1} log σ(q'_i·k'_l/√d)."""
    del sizes

    def added(head, q, token, keys):
        del q
        gates = []
        for key in keys:
            logit = key.logit
            if gate == "separate":
                own_q = token.x[-1] @ params["query"][:, head]
                logit = float(own_q @ (key.x[-1] @ params["key"][:, head])) / math.sqrt(width)
            gates.append(0.0 if key.own else log_sigmoid(logit))
        return [sum(gates[j:]) for j in range(len(keys))]

    return Rule(added=added)


def cope_signed(
    params: Params, sizes: Sizes, npos_max: int = 64, scale_position_logits: bool = False
) -> Rule:
    """p = Σ_{l=j..i} tanh(s_il/2), clipped to ±(N−1); row p + N − 1 of the table, interpolated."""

    def added(head, q, token, keys):
        del head, token
        steps = [math.tanh(key.logit / 2) for key in keys]
        logits = []
        for j in range(len(keys)):
            p = min(max(sum(steps[j:]), 1 - npos_max), npos_max - 1) + npos_max - 1
            below, above = math.floor(p), math.ceil(p)
            e = (p - below) * params["table"][above] + (1 - p + below) * params["table"][below]
            logits.append(
                float(q @ e) / (math.sqrt(sizes.head_dim) if scale_position_logits else 1.0)
            )
        return logits

    return Rule(added=added)


def dape(params: Params, sizes: Sizes, hidden: int = 32, keys: int = 1) -> Rule:
    """b + f([s; b]) with ALiBi's b, a network over the heads, and over the neighbouring keys."""
    # For powers of two.
    size, slopes = keys, [2 ** (-8 * (h + 1) / sizes.heads) for h in range(sizes.heads)]

    def added(head, q, token, keys):
        del q
        by_index = {key.index: key for key in keys}

        def inputs(index):
            if index not in by_index:
                return [0.0] * (2 * sizes.heads)
            key = by_index[index]
            return [*key.logits, *(-slope * abs(token.position - key.position) for slope in slopes)]

        biases = []
        for key in keys:
            units = [float(bias) for bias in params["hidden_bias"]]
            for offset in range(size):
                for number, unit_in in enumerate(inputs(key.index + offset - size // 2)):
                    for f in range(hidden):
                        units[f] += unit_in * float(params["hidden_kernel"][offset, number, f])
            total = float(params["out_bias"][head])
            for f, unit in enumerate(units):
                total += (unit if unit > 0 else 0.01 * unit) * float(params["out_kernel"][f, head])
            biases.append(total - slopes[head] * abs(token.position - key.position))
        return biases

    return Rule(added=added)


def selective(params: Params, sizes: Sizes) -> Rule:
    """F_ij = Σ relu(s_lj of head 1) over queries l between; never of token i or key 0."""
    del params, sizes

    def hidden(rows):
        masks = []
        for i, row in enumerate(rows):
            of_query = {}
            for j in row:
                of_query[j] = 0.0
                for earlier in rows[:i]:
                    if j in earlier and j not in (min(earlier), max(earlier)):
                        of_query[j] += max(earlier[j], 0.0)
            masks.append(of_query)
        return masks

    return Rule(hidden=hidden)


def learned_sink(params: Params, sizes: Sizes) -> Rule:
    """A softmax with one more logit, b_h."""
    del sizes

    def weights(head, logits, keys):
        del keys
        return softmax([*logits, float(params["logits"][head])])[:-1]

    return Rule(weights=weights)


PAIR_RULES = {
    "stick_breaking": stick_breaking,
    "tra": tra,
    "row_fox": row_fox,
    "cope_signed": cope_signed,
    "dape": dape,
    "selective": selective,
    "learned_sink": learned_sink,
}
