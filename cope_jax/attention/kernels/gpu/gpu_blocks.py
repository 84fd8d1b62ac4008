"""The steps of the Triton kernels in `gpu_kernels` for one block of keys.

Arrays are contiguous, `[B, L, H, K]`. Names are those of `NativeScore`: x_i are the queries of the
gates, u_j their keys, z_i[n] = x_i·e[n]. GATES is 0 for no gates, 1 for gates of the logits, and 2
for gates of keys u. N is 0 where the position is multiplied by a slope instead of looked up in a
table.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # stands for −∞, whose differences are NaN


@triton.jit
def read(array, stride, count, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Reads `count` rows of WIDTH numbers, as a block with zeros for what is missing."""
    rows, columns = (
        tl.arange(0, ROWS)[:, None],
        tl.arange(0, triton.next_power_of_2(WIDTH))[None, :],
    )
    return tl.load(
        array + rows * stride + columns, mask=(rows < count) & (columns < WIDTH), other=0.0
    )


@triton.jit
def write(array, stride, count, block, ADD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Writes a block that lies as `read` says.

    With ADD, it adds to what other programs add at the same time.
    """
    rows, columns = (
        tl.arange(0, ROWS)[:, None],
        tl.arange(0, triton.next_power_of_2(WIDTH))[None, :],
    )
    to, mask = array + rows * stride + columns, (rows < count) & (columns < WIDTH)
    if ADD:
        tl.atomic_add(to, block, mask=mask, sem="relaxed")
    else:
        tl.store(to, block.to(array.dtype.element_ty), mask=mask)


@triton.jit
def product(x, y):
    """A matrix product with float32 sums.

    Tensor cores multiply float32 as sums of three products of tf32.
    """
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def place(L: tl.constexpr, H: tl.constexpr, QUERIES: tl.constexpr):
    """The example, the head and the first query of this program.

    Of a head, programs with most keys start first.
    """
    STRIPS: tl.constexpr = (L + QUERIES - 1) // QUERIES
    number, strip = tl.program_id(0) // STRIPS, STRIPS - 1 - tl.program_id(0) % STRIPS
    return (number // H).to(tl.int64), number % H, strip * QUERIES


@triton.jit
def visible(
    start, first, q_ids, k_ids, L: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Returns the keys of a block that each query sees, `[QUERIES, KEYS]`.

    The last query is at the last key.
    """
    rows, keys = start + tl.arange(0, QUERIES)[:, None], first + tl.arange(0, KEYS)[None, :]
    index = rows + (M - L)
    see = (keys < M) & (rows < L)
    if CAUSAL:
        see = see & (keys <= index)
    if WINDOW:
        see = see & (keys > index - WINDOW) & (keys < index + WINDOW)
    if SEGMENTS:
        see = see & (tl.load(q_ids + rows, mask=rows < L) == tl.load(k_ids + keys, mask=keys < M))
    return see


@triton.jit
def _is_outside(first, low, high, k_ids, M: tl.constexpr, KEYS: tl.constexpr):
    """Returns whether no key of a block is in a segment between `low` and `high`."""
    keys = first + tl.arange(0, KEYS)
    ids = tl.load(k_ids + keys, mask=keys < M, other=0)
    return tl.sum(((keys < M) & (ids >= low) & (ids <= high)).to(tl.int32), 0) == 0


@triton.jit
def spans(
    start, q_ids, k_ids, L: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Two ranges of blocks of keys: no pair outside first … end−1 is visible, all pairs in full …
    full_end−1 are.
    """
    # Indices of the first and last query.
    low, high = start + (M - L), tl.minimum(start + QUERIES, L) - 1 + (M - L)
    first, full = 0, 0
    end = M + start * 0
    full_end = end
    if CAUSAL:
        end, full_end = tl.minimum(end, high + 1), tl.minimum(end, low + 1)
    if WINDOW:
        first, full = tl.maximum(low - WINDOW + 1, 0), tl.maximum(high - WINDOW + 1, 0)
        end, full_end = tl.minimum(end, high + WINDOW), tl.minimum(full_end, low + WINDOW)
    first, end = first // KEYS * KEYS, tl.cdiv(tl.maximum(end, 0), KEYS) * KEYS
    if SEGMENTS:
        full_end = 0
        rows = start + tl.arange(0, QUERIES)
        ids = tl.load(q_ids + rows, mask=rows < L, other=0)
        low_id, high_id = (
            tl.min(tl.where(rows < L, ids, 2147483647), 0),
            tl.max(tl.where(rows < L, ids, -2147483648), 0),
        )
        while (first < end) & _is_outside(first, low_id, high_id, k_ids, M, KEYS):
            first += KEYS
    full_end = tl.maximum(tl.maximum(full_end, 0) // KEYS * KEYS, first)
    full = tl.maximum(tl.cdiv(full, KEYS) * KEYS, first)
    return first, end, tl.minimum(full, full_end), full_end


@triton.jit
def unsaturated(sums, N: tl.constexpr):
    """Returns whether some row can still be at a position below N−1."""
    return (N == 0) | (tl.min(sums, 0) < N - 1)


@triton.jit
def count_gates(gate_logits, see, sums):
    """The gates of a block, the sums of gates from each key to the query, and the sums after this
    block.
    """
    gates = tl.where(see, tl.sigmoid(gate_logits), 0.0)
    return gates, sums[:, None] + tl.cumsum(gates, 1, reverse=True), sums + tl.sum(gates, 1)


@triton.jit
def position_logits(
    counts, z, slope, count, H: tl.constexpr, N: tl.constexpr, QUERIES: tl.constexpr
):
    """Returns the logits that positions add, the derivative by the position, the cell of the table
    and its weight.
    """
    if N == 0:
        return slope * counts, slope + 0 * counts, counts.to(tl.int32), counts
    position = tl.where(counts < N - 1, counts, N - 1.0)  # N−1 for NaN too
    cell = tl.floor(position).to(tl.int32)
    weight = position - cell.to(tl.float32)
    rows = tl.arange(0, QUERIES)[:, None]
    z += rows * (H * N)
    low = tl.load(z + cell, mask=rows < count, other=0.0)
    high = tl.load(z + tl.minimum(cell + 1, N - 1), mask=rows < count, other=0.0)
    # 0 at whole positions, as in the paper's listing.
    derivative = tl.where(weight > 0, high - low, 0.0)
    return low + weight * derivative, derivative, cell, weight


@triton.jit
def add_block(logits, see, v, top, total, weighted):
    """Adds a block of keys to the highest logit, to Σ_j e^(s_ij − top), and to the same sum of
    values.
    """
    higher = tl.maximum(top, tl.max(tl.where(see, logits, LOWEST), 1))
    weights = tl.where(see, tl.exp(logits - higher[:, None]), 0.0)
    shrink = tl.exp(top - higher)
    return (
        higher,
        total * shrink + tl.sum(weights, 1),
        weighted * shrink[:, None] + product(weights.to(v.dtype), v),
    )
