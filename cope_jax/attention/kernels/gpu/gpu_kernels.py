"""The kernels of `gpu_attention`, in Triton: one program computes one block of queries of one head.

A program visits the keys block by block from the nearest to the farthest, as `streaming_softmax`
does. As long as some row is not saturated it counts the gates of each block. Beyond, all keys of a
row are at the last position, and one number is added to all logits of the row.
"""

import triton
import triton.language as tl

from cope_jax.attention.kernels.gpu.gpu_blocks import (
    LOWEST,
    add_block,
    count_gates,
    place,
    position_logits,
    product,
    read,
    spans,
    unsaturated,
    visible,
    write,
)


@triton.jit
def _forward_far(
    q_block, k, v, constant, see, count, top, total, weighted,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds a block of keys whose logits get the same constant in a row."""
    logits = product(q_block, tl.trans(read(k, G * K, count, K, KEYS))) * SCALE + constant[:, None]
    return add_block(logits, see, read(v, G * V, count, V, KEYS), top, total, weighted)


@triton.jit
def forward(
    q, k, v, x, u, z, slopes, q_ids, k_ids, out, logsumexp,
    L: tl.constexpr, M: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, GATES: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Computes out_BLHV and logsumexp_BLH."""
    b, h, start = place(L, H, QUERIES)
    row, count = (b * L + start) * H + h, L - start
    keys = b * M * G + h // (H // G)
    q_ids, k_ids = q_ids + b * L, k_ids + b * M
    rows = tl.arange(0, QUERIES)
    q_block = read(q + row * K, H * K, count, K, QUERIES)
    top, total = tl.full((QUERIES,), LOWEST, tl.float32), tl.zeros((QUERIES,), tl.float32)
    weighted = tl.zeros((QUERIES, triton.next_power_of_2(V)), tl.float32)
    constant = tl.zeros((QUERIES,), tl.float32)
    first, end, full, full_end = spans(
        start, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS
    )
    if GATES:
        slope = tl.load(slopes + h) if N == 0 else 0.0
        if GATES == 2:
            x_block = read(x + row * K, H * K, count, K, QUERIES)
        sums = tl.where(rows < count, 0.0, N + 0.0)
        while (end > first) & unsaturated(sums, N):
            end -= KEYS
            key = keys + end.to(tl.int64) * G
            see = visible(start, end, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS)
            logits = product(q_block, tl.trans(read(k + key * K, G * K, M - end, K, KEYS))) * SCALE
            gate_logits = logits
            if GATES == 2:
                gate_logits = (
                    product(x_block, tl.trans(read(u + key * K, G * K, M - end, K, KEYS))) * SCALE
                )
            _, counts, sums = count_gates(gate_logits, see, sums)
            added, _, _, _ = position_logits(counts, z + row * N, slope, count, H, N, QUERIES)
            v_block = read(v + key * V, G * V, M - end, V, KEYS)
            top, total, weighted = add_block(logits + added, see, v_block, top, total, weighted)
        if N:
            constant = tl.load(z + row * N + rows * (H * N) + N - 1, mask=rows < count, other=0.0)
    for stage in tl.static_range(
        2
    ):  # near blocks with hidden pairs, those without, and then far ones with hidden pairs
        for _ in range(tl.maximum(end - (full_end if stage == 0 else first), 0) // KEYS):
            end -= KEYS
            key = keys + end.to(tl.int64) * G
            see = visible(start, end, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS)
            top, total, weighted = _forward_far(
                q_block,
                k + key * K,
                v + key * V,
                constant,
                see,
                M - end,
                top,
                total,
                weighted,
                G,
                K,
                V,
                SCALE,
                KEYS,
            )
        if stage == 0:
            for _ in range(tl.maximum(end - full, 0) // FAR):
                end -= FAR
                key = keys + end.to(tl.int64) * G
                see = tl.full((QUERIES, FAR), 1, tl.int1)
                top, total, weighted = _forward_far(
                    q_block,
                    k + key * K,
                    v + key * V,
                    constant,
                    see,
                    FAR,
                    top,
                    total,
                    weighted,
                    G,
                    K,
                    V,
                    SCALE,
                    FAR,
                )
    # The result of a query that sees no key is 0; NaN stays.
    total = tl.where(total == 0, 1.0, total)
    write(out + row * V, H * V, count, weighted / total[:, None], False, V, QUERIES)
    tl.store(logsumexp + row + rows * H, top + tl.log(total), mask=rows < count)


@triton.jit
def _gradient(logits, see, v, dout, logsumexp, delta):
    """The weights of attention, and the gradient of the logits."""
    weights = tl.where(see, tl.exp(logits - logsumexp[:, None]), 0.0)
    return weights, weights * (product(dout, tl.trans(v)) - delta[:, None])


@triton.jit
def _add_gradients(
    weights, dlogits, q_block, k_block, dout_block, dq_block, dk, dv, count,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of a block of keys and values; returns the gradient of the queries with
    this block.
    """
    write(
        dv, G * V, count, product(tl.trans(weights.to(dout_block.dtype)), dout_block), True, V, KEYS
    )
    dlogits = (dlogits * SCALE).to(k_block.dtype)
    write(dk, G * K, count, product(tl.trans(dlogits), q_block), True, K, KEYS)
    return dq_block + product(dlogits, k_block)


@triton.jit
def _backward_far(
    q_block, k, v, constant, see, count, dout_block, lse_block, delta_block, dq_block, dconstant, dk, dv,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys whose logits get the same constant in a row."""
    k_block, v_block = read(k, G * K, count, K, KEYS), read(v, G * V, count, V, KEYS)
    logits = product(q_block, tl.trans(k_block)) * SCALE + constant[:, None]
    weights, dlogits = _gradient(logits, see, v_block, dout_block, lse_block, delta_block)
    dq_block = _add_gradients(
        weights,
        dlogits,
        q_block,
        k_block,
        dout_block,
        dq_block,
        dk,
        dv,
        count,
        G,
        K,
        V,
        SCALE,
        KEYS,
    )
    return dq_block, dconstant + tl.sum(dlogits, 1)


@triton.jit
def backward(
    q, k, v, x, u, z, slopes, q_ids, k_ids, dout, logsumexp, delta, dq, dk, dv, dx, du, dz, dslopes,
    L: tl.constexpr, M: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, GATES: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Computes dq_BLHK and dx_BLHK, and adds to dk_BMGK, dv_BMGV, du_BMGK, dz_BLHN and dslopes_H,
    which begin at 0.

    delta_BLH is Σ out·dout. The order of the sums over queries, and so their rounding, differs from
    run to run.
    """
    b, h, start = place(L, H, QUERIES)
    row, count = (b * L + start) * H + h, L - start
    keys = b * M * G + h // (H // G)
    q_ids, k_ids = q_ids + b * L, k_ids + b * M
    rows = tl.arange(0, QUERIES)
    of_row = row + rows * H
    q_block = read(q + row * K, H * K, count, K, QUERIES)
    dout_block = read(dout + row * V, H * V, count, V, QUERIES)
    lse_block = tl.load(logsumexp + of_row, mask=rows < count, other=0.0)
    delta_block = tl.load(delta + of_row, mask=rows < count, other=0.0)
    dq_block = tl.zeros((QUERIES, triton.next_power_of_2(K)), tl.float32)
    constant, dconstant = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES,), tl.float32)
    first, end, full, full_end = spans(
        start, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS
    )
    if GATES:
        slope = tl.load(slopes + h) if N == 0 else 0.0
        dslope = tl.zeros((QUERIES,), tl.float32)
        if GATES == 2:
            x_block = read(x + row * K, H * K, count, K, QUERIES)
            dx_block = tl.zeros((QUERIES, triton.next_power_of_2(K)), tl.float32)
        # A gate moves its own position and those of all farther keys. The first visit sums the
        # gradients of all positions; the second subtracts those of nearer keys.
        dpositions = tl.zeros((QUERIES,), tl.float32)
        last = end
        for visit in tl.static_range(2):
            end = last
            sums = tl.where(rows < count, 0.0, N + 0.0)
            while (end > first) & unsaturated(sums, N):
                end -= KEYS
                key = keys + end.to(tl.int64) * G
                see = visible(
                    start, end, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS
                )
                k_block = read(k + key * K, G * K, M - end, K, KEYS)
                logits = product(q_block, tl.trans(k_block)) * SCALE
                gate_logits = logits
                if GATES == 2:
                    u_block = read(u + key * K, G * K, M - end, K, KEYS)
                    gate_logits = product(x_block, tl.trans(u_block)) * SCALE
                gates, counts, sums = count_gates(gate_logits, see, sums)
                added, derivative, cell, weight = position_logits(
                    counts, z + row * N, slope, count, H, N, QUERIES
                )
                v_block = read(v + key * V, G * V, M - end, V, KEYS)
                weights, dlogits = _gradient(
                    logits + added, see, v_block, dout_block, lse_block, delta_block
                )
                dposition = dlogits * derivative
                if visit == 0:
                    dpositions += tl.sum(dposition, 1)
                else:
                    dpositions -= tl.sum(dposition, 1)  # now those of farther blocks
                    dgates = (dpositions[:, None] + tl.cumsum(dposition, 1)) * gates * (1 - gates)
                    if N:
                        dconstant += tl.sum(tl.where(cell == N - 1, dlogits, 0.0), 1)
                        to = dz + row * N + rows[:, None] * (H * N) + cell
                        below = see & (cell < N - 1)
                        tl.atomic_add(to, dlogits * (1 - weight), mask=below, sem="relaxed")
                        tl.atomic_add(to + 1, dlogits * weight, mask=below, sem="relaxed")
                    else:
                        dslope += tl.sum(dlogits * counts, 1)
                    if GATES == 1:
                        dlogits += dgates
                    else:
                        dgates = (dgates * SCALE).to(u_block.dtype)
                        dx_block += product(dgates, u_block)
                        du_block = product(tl.trans(dgates), x_block)
                        write(du + key * K, G * K, M - end, du_block, True, K, KEYS)
                    dq_block = _add_gradients(
                        weights, dlogits, q_block, k_block, dout_block, dq_block, dk + key * K, dv + key * V, M - end,
                        G, K, V, SCALE, KEYS,
                    )  # fmt: skip
        if GATES == 2:
            write(dx + row * K, H * K, count, dx_block, False, K, QUERIES)
        if N:
            constant = tl.load(z + of_row * N + N - 1, mask=rows < count, other=0.0)
        else:
            tl.atomic_add(dslopes + h, tl.sum(dslope, 0), sem="relaxed")
    for stage in tl.static_range(2):  # as in `forward`
        for _ in range(tl.maximum(end - (full_end if stage == 0 else first), 0) // KEYS):
            end -= KEYS
            key = keys + end.to(tl.int64) * G
            see = visible(start, end, q_ids, k_ids, L, M, CAUSAL, WINDOW, SEGMENTS, QUERIES, KEYS)
            dq_block, dconstant = _backward_far(
                q_block, k + key * K, v + key * V, constant, see, M - end, dout_block, lse_block, delta_block,
                dq_block, dconstant, dk + key * K, dv + key * V, G, K, V, SCALE, KEYS,
            )  # fmt: skip
        if stage == 0:
            for _ in range(tl.maximum(end - full, 0) // FAR):
                end -= FAR
                key = keys + end.to(tl.int64) * G
                see = tl.full((QUERIES, FAR), 1, tl.int1)
                dq_block, dconstant = _backward_far(
                    q_block, k + key * K, v + key * V, constant, see, FAR, dout_block, lse_block, delta_block,
                    dq_block, dconstant, dk + key * K, dv + key * V, G, K, V, SCALE, FAR,
                )  # fmt: skip
    write(dq + row * K, H * K, count, dq_block, False, K, QUERIES)
    if N:
        tl.atomic_add(dz + of_row * N + N - 1, dconstant, mask=rows < count, sem="relaxed")
