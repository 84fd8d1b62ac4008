"""Operations of generated kernels that Triton has not, as functions in Triton."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """The logarithm of 1 + x, also where x is small."""
    u = 1.0 + x
    exact = (u == 1.0) | (u == float("inf"))
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    small = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def threefry(key0, key1, x0, x1):
    """Two words of random bits, as JAX computes them; all are unsigned."""
    key2 = key0 ^ key1 ^ tl.full([1, 1], 0x1BD11BDA, tl.uint32)
    x0, x1 = x0 + key0, x1 + key1
    for group in tl.static_range(5):
        for turn in tl.static_range(4):
            even: tl.constexpr = (13, 15, 26, 6)[turn]
            odd: tl.constexpr = (17, 29, 16, 24)[turn]
            by: tl.constexpr = odd if group % 2 else even
            x0 += x1
            x1 = ((x1 << by) | (x1 >> (32 - by))) ^ x0
        x0 += key1
        x1 += key2 + tl.full([1, 1], group + 1, tl.uint32)
        key0, key1, key2 = key1, key2, key0
    return x0, x1


@triton.jit
def every(x):
    """Returns whether all entries are true."""
    return tl.min(tl.min(x.to(tl.int32), 1), 0)


@triton.jit
def take(row, index, step, SIZE: tl.constexpr):
    """Entries of rows in memory; `row` points to the first entry of each."""
    return tl.load(row + tl.minimum(tl.maximum(index, 0), SIZE - 1) * step)


@triton.jit
def take_from(z, index, SIZE: tl.constexpr):
    """Entries of rows in registers."""
    return tl.gather(z, tl.minimum(tl.maximum(index, 0), SIZE - 1), 1)


@triton.jit
def count_below(row, x, step, SIZE: tl.constexpr):
    """The number of entries of rows in memory that are below x."""
    count = tl.zeros(x.shape, tl.int32)
    for n in range(SIZE):
        count += (tl.load(row + n * step) < x).to(tl.int32)
    return count


@triton.jit
def _share(cell, index, above, y, HATS: tl.constexpr):
    """The sum that each row adds to a cell, `[rows, 1]`."""
    if HATS:
        y = tl.where(index == cell, y - above, tl.where(index + 1 == cell, above, 0.0))
    else:
        y = tl.where(index == cell, y, 0.0)
    return tl.sum(y, 1, keep_dims=True)


@triton.jit
def _cells(index, y, SIZE: tl.constexpr, HATS: tl.constexpr):
    """The cells that some entry adds to: (the first, the one after the last, the cell of each entry,
    what it adds to the next cell).
    """
    cell = tl.minimum(tl.maximum(index.to(tl.int32), 0), SIZE - 1)
    above = y
    first, last = tl.min(tl.min(cell, 1), 0), tl.max(tl.max(cell, 1), 0)
    if HATS:
        # At the last cell there is no next.
        above = tl.where(cell < SIZE - 1, y * (index - cell.to(tl.float32)), 0.0)
        last = tl.minimum(last + 1, SIZE - 1)
    return first, last + 1, cell, above


@triton.jit
def collect(index, y, SIZE: tl.constexpr, HATS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds each entry of y to the cell of its row that `index` names, `[rows, WIDTH]`.

    With HATS, an index between two cells divides it between them. No thread adds to what another
    does, so the result is the same in every run.
    """
    first, end, index, above = _cells(index, y, SIZE, HATS)
    result = tl.zeros([y.shape[0], WIDTH], tl.float32)
    for cell in range(first, end):
        here = tl.arange(0, WIDTH)[None, :] == cell
        result += tl.where(here, _share(cell, index, above, y, HATS), 0.0)
    return result


@triton.jit
def collect_to(row, index, y, SIZE: tl.constexpr, HATS: tl.constexpr):
    """The same in memory that only this program uses, without the cells that no entry adds to."""
    first, end, index, above = _cells(index, y, SIZE, HATS)
    for cell in range(first, end):
        add_to(row + cell, _share(cell, index, above, y, HATS), True)


@triton.jit
def add_to(pointers, x, mask):
    """Adds to memory that only this program uses.

    Several threads may have copies of an entry: all read it before one writes it.
    """
    x += tl.load(pointers, mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(pointers, x, mask=mask)
