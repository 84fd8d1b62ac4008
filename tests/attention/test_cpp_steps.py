"""Each operation that generated C++ knows, and random programs of them, give what JAX or NumPy gives."""

import ctypes
import functools
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.attention.kernels.cpu import library
from cope_jax.attention.kernels.cpu.cpp_kernel import CppGraph
from cope_jax.attention.kernels.cpu.cpp_schedule import Result, Schedule
from cope_jax.attention.kernels.cpu.cpp_text import Step
from cope_jax.attention.kernels.tile.tile_graph import FORMS
from cope_jax.attention.kernels.tile.tile_program import TileProgram
from cope_jax.attention.kernels.tile.tile_values import NotATile, natural
from cope_jax.ops import tile
from tests.attention.test_generated import native as native

pytestmark = pytest.mark.usefixtures("native")
ROWS = 6
WIDTHS = (64, 24, 5)  # some vectors divide the first two, none divides the last


def step_of(name, function, arrays, tiles=False, real="float32"):
    """The text of a step that computes `function`, with an entry for ctypes."""
    specs = tuple(natural(x.shape, x.dtype) for x in arrays)
    shape = jax.eval_shape(lambda: _traced(function, specs))
    like = natural(shape.shape, shape.dtype)
    program = TileProgram(FORMS, function, specs, like)
    graph = CppGraph(program, real, tiles)
    (node,) = graph.results
    results = [Result(node, "set", 0, like.size)]
    sources = {n: f"t.in[{n}]" for n in range(len(arrays))}
    step = Step(name, Schedule(graph, results), sources, {})
    entry = (
        f'extern "C" void run_{name}(const void** in, real* out) {{\n'
        f"  static real memory[{step.memory + 64}];\n  Tiles t;\n  t.out[0] = out;\n"
        f"  for (int n = 0; n < {len(arrays)}; n++) t.in[n] = in[n];\n"
        f"  if ({int(tiles)}) configure_tiles();\n"
        f"  {name}(t, (real*)(((uintptr_t)memory + 63) / 64 * 64));\n"
        f"  if ({int(tiles)}) release_tiles();\n}}\n"
    )
    return step.text + entry, like, program.used


def _traced(function, specs):
    with tile.tracing():
        return function(*(jnp.zeros(spec.shape, spec.dtype) for spec in specs))


def run(cases, tiles=False):
    """The result of each (function, arrays), after one compilation; in float64 if it is enabled."""
    wide = jax.config.jax_enable_x64
    real, whole = ("float64", np.int64) if wide else ("float32", np.int32)
    steps = [step_of(f"step{n}", *case, tiles, real) for n, case in enumerate(cases)]
    texts = ["#define DOUBLE"] * wide + ['#include "driver.h"', *(text for text, _, _ in steps)]
    compiled = ctypes.CDLL(str(library._compiled("\n".join(texts))))
    results = []
    for n, ((_, arrays), (_, like, used)) in enumerate(zip(cases, steps, strict=True)):
        given = [
            np.ascontiguousarray(x, whole if x.dtype == np.int32 else real)
            for x, use in zip(arrays, used, strict=True)
            if use
        ]
        out = np.zeros(like.size, whole if like.dtype == bool else real)
        addresses = (ctypes.c_void_p * len(given))(*(x.ctypes.data for x in given))
        getattr(compiled, f"run_step{n}")(addresses, out.ctypes.data_as(ctypes.c_void_p))
        results.append(
            out.reshape(like.shape) != 0 if like.dtype == bool else out.reshape(like.shape)
        )
    return results


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    flags = ["-Og" if flag == "-O3" else flag for flag in library.KERNEL_FLAGS]
    monkeypatch.setattr(library, "KERNEL_FLAGS", flags)


def random(*shape, seed=0, low=-3.0, high=3.0):
    dtype = np.float64 if jax.config.jax_enable_x64 else np.float32
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def edges(x):
    """Numbers beyond int32, infinities and NaN."""
    beyond = jnp.where(x > 2, jnp.inf, jnp.where(x < -2, -jnp.inf, 2e9 * x))
    return jnp.where((x > 0) & (x < 0.5), jnp.nan, beyond)


UNARY = {
    "abs": jnp.abs,
    "ceil of a negative": lambda x: -jnp.floor(-x),
    "cos": jnp.cos,
    "erf": jax.lax.erf,
    "exp": lambda x: jnp.exp(20 * x),
    "exp of much": lambda x: jnp.exp(jnp.minimum(40 * x, 80.0)),
    "floor": jnp.floor,
    "is_finite": lambda x: jnp.where(jnp.isfinite(x / jnp.where(x > 0, x, 0)), 1.0, 2.0),
    "log": lambda x: jnp.log(jnp.abs(x)),
    "log of nothing": lambda x: jnp.log(jnp.maximum(x, 0.0)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x) ** 9),
    "log1p of little": lambda x: jnp.log1p(x * 1e-5) * 1e5,
    "logistic": lambda x: jax.nn.sigmoid(8 * x),
    "tanh": jnp.tanh,
    "tanh of little": lambda x: jnp.tanh(x / 20),
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x) + 0.1),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "sign": jnp.sign,
    "sin": jnp.sin,
    "negative": jnp.negative,
    "powers": lambda x: x**3 + (x + 4) ** -2,
    "division by powers of two": lambda x: x / 8 + x / jnp.where(x > 0, 2.0, 4.0) + x / 3,
    "whole numbers": lambda x: jnp.abs((5 * x).astype(jnp.int32) - 3).astype(x.dtype),
    "conditions": lambda x: jnp.where(
        ((x > 1) & ~(x >= 2)) | (x <= -1) | (x == 0) | (x != x), x, -x
    ),
    "numbers of conditions": lambda x: (
        (x < 0).astype(x.dtype) + (x.astype(jnp.int32) != 0).astype(x.dtype)
    ),
    "whole numbers beyond 32 bits": lambda x: (
        (x * 6e8).astype(jnp.int32) * 5 + (x * 7e8).astype(jnp.int32)
    ).astype(x.dtype),
    "columns": lambda x: x + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1).astype(x.dtype),
    "rows": lambda x: x + jax.lax.broadcasted_iota(x.dtype, x.shape, 0),
    "sums": lambda x: x / jnp.abs(x).sum(axis=1, keepdims=True) + x.sum(axis=0, keepdims=True),
    "edges of floor": lambda x: jnp.floor(edges(x)),
    "edges of whole numbers": lambda x: jnp.clip(edges(x).astype(jnp.int32), -9, 9).astype(x.dtype),
    "edges of exp": lambda x: jnp.exp(jnp.clip(edges(x), -99, 99)) + jnp.exp(88 + x / 9) * 1e-37,
    "exactly nothing": lambda x: jnp.exp(jnp.minimum(x, 0) - 3e38) * 1e38,
    "gates of exactly nothing": lambda x: jax.nn.sigmoid(jnp.minimum(x, 0) - 3e38) * 1e38,
    "edges of log": lambda x: jnp.log(jnp.abs(x) * 1.2e-38) + jnp.log(edges(x)),
    "edges of logistic": lambda x: jnp.log(jax.nn.sigmoid(99 * x)),
    "edges of extremes": lambda x: edges(x).max(axis=1) + edges(x).min(axis=1),
    "extremes": lambda x: x - x.max(axis=1, keepdims=True) * x.min(axis=0, keepdims=True),
    "other extremes": lambda x: x - x.max(axis=0, keepdims=True) * x.min(axis=1, keepdims=True),
    "sum of equal entries": lambda x: jnp.broadcast_to(x[:, :1], x.shape).sum(axis=1),
    "entries": lambda x: x[:, 1:2] * x + x[:, -1:],
    "entries of what was computed": lambda x: jnp.exp(x)[:, 2:3] * x,
    "a part": lambda x: jnp.sin(x[1:4, 2:5]),
    "joined": lambda x: jnp.concatenate([x[:, 3:], 2 * x[:, :3]], axis=1),
    "joined rows": lambda x: jnp.concatenate([jnp.exp(x[2:]), x[:2]], axis=0),
    "transposed": lambda x: jnp.exp(jnp.sin(x).T),
    "a product transposed": lambda x: (jnp.exp(x[:3, :3]) @ jnp.sin(x[:3])).T,
    "products": lambda x: x @ x.T @ (x + x @ jnp.sin(x).T @ x),
    "a product added": lambda x: (2 * x * x[:, :1]) + jnp.cos(x) @ (x.T @ x),
    "a row as a column": lambda x: (
        x * x.sum(axis=0)[: x.shape[0]][:, None] if x.shape[1] >= ROWS else x
    ),
    "an outer product": lambda x: x[:, :1] * x[:1] + x,
    "softmax": lambda x: jax.nn.softmax(jnp.where(x > -2, x, -1e30), axis=1),
}


@functools.cache
def unary_results(wide):
    del wide  # part of the key
    cases = [(f, [random(ROWS, width)]) for width in WIDTHS for f in UNARY.values()]
    return dict(
        zip(
            [(name, w) for w in WIDTHS for name in UNARY],
            zip(cases, run(cases), strict=True),
            strict=True,
        )
    )


@pytest.fixture(params=[False, True], ids=["float32", "float64"])
def wide(request):
    """True for a test in float64."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.mark.parametrize("width", WIDTHS)
def test_operations(width, wide):
    rtol, atol = (3e-14, 2e-14) if wide else (3e-6, 2e-6)
    for name in UNARY:
        (function, arrays), computed = unary_results(wide)[name, width]
        exact = np.asarray(jax.jit(function)(*arrays)).reshape(computed.shape)
        scale = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
        np.testing.assert_allclose(computed, exact, rtol=rtol, atol=atol * scale, err_msg=name)


def test_float32_is_rounded_where_the_kernel_computes_in_float64(x64):
    x = np.asarray([[1 / 3, -1 / 3, 1 + 2**-24, 1 + 3 * 2**-24, 1e300, np.nan, 7.0, 2.0**24 + 1]])

    def function(x):
        low = x.astype(jnp.float32)
        third = low / jnp.float32(3) + (7 * x).astype(jnp.int32).astype(jnp.float32)
        return third.astype(x.dtype) + 1e-9 * low.astype(x.dtype)

    np.testing.assert_array_equal(*run([(function, [x])]), jax.jit(function)(x))


def hats(p, size):
    return np.maximum(0, 1 - np.abs(p[..., None] - np.arange(size)))


def among(z, width):
    """Numbers in rows, among those of z: equal neighbours, slowly rising ones, any, and after the first
    one those of z itself.
    """
    x = random(len(z), width, seed=3)
    x[0], x[1] = z[0, 0], np.linspace(z.min() - 1, z.max() + 1, width)
    x[2, ::3] = z[2, :width:3].repeat(width)[: len(x[2, ::3])]
    x[4] = z[4, 0]
    x[4, 0] += 1e-3
    return x


SELDOM = [(n, wide) for n in (2, 16, 32) for wide in (False, True)]


@pytest.mark.parametrize(
    ("size", "wide"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM]
    + [(7, False), (17, False), (64, False), (70, False), (70, True)],
    indirect=["wide"],
)
def test_tables(size, wide):
    """Sums along the keys, look-ups, and what adds to the places that an index gives."""
    cases, exact = [], []
    for width in WIDTHS:
        z, dy = random(ROWS, size), random(ROWS, width, seed=1)
        rising = random(ROWS, width, seed=2, low=0, high=size - 1)
        rising[:, 0], rising[:, 1], rising[:, 2] = 0, size - 1, 1  # whole positions, and the last
        index = rising.astype(np.int32)
        one_hot = index[..., None] == np.arange(size)
        last = np.full_like(index, size - 1)  # neighbours add to one place
        last[3:] -= np.arange(width, dtype=index.dtype) % min(size, 5)
        starts = np.linspace(-1, size, ROWS)[:, None]
        steps = random(ROWS, width, seed=4, low=-0.9, high=0.9)
        wandering = np.clip(starts + np.cumsum(steps, axis=1), 0, size - 1).astype(steps.dtype)
        for p in (rising, -np.sort(-rising), wandering):
            weights = hats(p, size)
            cases += [
                (lambda z, p: tile.look_up_p.bind(z, p, descending=False)[0], [z, p]),
                (lambda p, z: tile.spread_p.bind(p, z, descending=False), [p, z]),
                (lambda p, dy: tile.gather_up_p.bind(p, dy, size=size, descending=False), [p, dy]),
                (lambda z, p: tile.look_up_p.bind(z, p, descending=False)[1], [z, p]),
            ]
            floor = np.floor(p).astype(int)
            slopes = np.take_along_axis(z, np.minimum(floor + 1, size - 1), 1)
            slopes = slopes - np.take_along_axis(z, floor, 1)
            exact += [
                np.einsum("lmn,ln->lm", weights, z),
                np.einsum("lmn,ln->lm", weights, z),
                np.einsum("lmn,lm->ln", weights, dy),
                np.where(p > floor, slopes, 0),
            ]
        cases += [
            (lambda i, z: tile.take_rows_p.bind(i, z), [index, z]),
            (lambda i, dy: tile.add_rows_p.bind(i, dy, size=size), [index, dy]),
            (lambda i, z: tile.take_table_p.bind(i, jnp.sin(z)), [index, z[0]]),
            (lambda i, dy: tile.add_table_p.bind(i, dy, size=size), [index, dy]),
            (lambda i, z: tile.take_rows_p.bind(i, z), [last, z]),
            (lambda i, dy: tile.add_rows_p.bind(i, dy, size=size), [last, dy]),
            (
                lambda z, x: tile.count_below_p.bind(z, x).astype(x.dtype),
                [np.sort(z), among(z, width)],
            ),
            (lambda dy: tile.running_sum_p.bind(jnp.sin(dy), suffix=True) + dy, [dy]),
            (lambda dy: 2 * tile.running_sum_p.bind(dy, suffix=False), [dy]),
        ]
        exact += [
            np.take_along_axis(z, index, 1),
            np.einsum("lmn,lm->ln", one_hot, dy),
            np.sin(z[0])[index],
            np.einsum("lmn,lm->n", one_hot, dy),
            np.take_along_axis(z, last, 1),
            np.einsum("lmn,lm->ln", last[..., None] == np.arange(size), dy),
            (np.sort(z)[:, None] < among(z, width)[..., None]).sum(-1),
            np.cumsum(np.sin(dy)[:, ::-1], axis=1)[:, ::-1] + dy,
            2 * np.cumsum(dy, axis=1),
        ]
    for n, (computed, right) in enumerate(zip(run(cases), exact, strict=True)):
        np.testing.assert_allclose(
            computed, right, rtol=0, atol=1e-13 if wide else 3e-5, err_msg=str(n)
        )


SIDES = [(64, 64, 64), (33, 40, 17), (1, 3, 70), (100, 150, 5)]


@pytest.mark.parametrize(
    ("low", "parts", "precision"),
    [((0, 1), "1, 1", None), ((0,), "1, 2", None), ((), "2, 2", "high")],
    ids=["bfloat16", "both", "high"],
)
def test_products_on_the_matrix_unit(low, parts, precision):
    """Of factors of any size, either of which may lie transposed; sums are float32."""
    library.has_tiles()  # asks the system for it

    def multiply(x, y):
        if low == (0,):
            x = x.astype(jnp.float32)
        return jax.lax.dot(x, y, preferred_element_type=jnp.float32)

    ways = [
        multiply,
        lambda x, y: multiply(x.T, y),
        lambda x, y: multiply(x, y.T),
        lambda x, y: multiply(x, y) + 3 * jnp.sin(multiply(x, y)),
        lambda x, y: multiply(x, y).T,
    ]

    def of(way):
        def function(*factors):
            return way(*(x.astype(jnp.bfloat16) if n in low else x for n, x in enumerate(factors)))

        return function

    cases, exact = [], []
    for rows, summed, columns in SIDES:
        for n, way in enumerate(ways):
            x = random(*((summed, rows) if n == 1 else (rows, summed)), seed=n)
            y = random(*((columns, summed) if n == 2 else (summed, columns)), seed=9)
            cases.append((of(way), [x, y]))
            x, y = (
                np.float64(a.astype(jnp.bfloat16) if m in low else a) for m, a in enumerate((x, y))
            )
            product = (x.T if n == 1 else x) @ (y.T if n == 2 else y)
            product = product.T if n == 4 else product
            exact.append(product + 3 * np.sin(product) if n == 3 else product)
    with jax.default_matmul_precision(precision):
        computed = run(cases, tiles=True)
        assert f"tile_product<{parts}>" in step_of("step", *cases[0], tiles=True)[0]
    with jax.default_matmul_precision("highest"):
        assert ("tile_product" in step_of("step", *cases[0], tiles=True)[0]) == (parts == "1, 1")
    for n, (result, right) in enumerate(zip(computed, exact, strict=True)):
        atol = (2e-6 if parts == "1, 1" else 4e-5) * np.abs(right).max() * (1 + 3 * (n % 5 == 3))
        np.testing.assert_allclose(result, right, rtol=0, atol=atol, err_msg=str(n))


def test_numbers_in_two_parts_stay_infinite_and_nan():
    numbers = [3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0, 1e-30, 0.0]
    x = np.diag(np.asarray(numbers, np.float32))
    x[4, 4] = np.uint32(2**31 - 1).view(np.float32)
    library.has_tiles()
    with jax.default_matmul_precision("high"):
        (computed,) = run([(lambda x: x @ jnp.ones((8, 1)), [x])], tiles=True)
    np.testing.assert_allclose(computed[:, 0], np.asarray(numbers, np.float32), rtol=1e-5)


def test_only_what_is_exact_in_bfloat16_is_multiplied_in_one_part():
    """A sum that became no bfloat16 yet is rounded before it is one."""
    x = random(8, 64)

    def function(x):
        total = -tile_sum(x.astype(jnp.bfloat16).astype(jnp.float32), False).astype(jnp.bfloat16)
        total = jnp.abs(total) / jnp.bfloat16(3.0)
        return jax.lax.dot(
            total, jnp.eye(64).astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )

    library.has_tiles()
    (computed,) = run([(function, [x])], tiles=True)
    sums = np.cumsum(np.float64(x.astype(jnp.bfloat16)), axis=1).astype(jnp.bfloat16)
    exact = (np.float32(np.abs(sums)) / 3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(computed, np.float32(exact))


def test_bfloat16_is_rounded_to_the_nearest():
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1e-40, 3.4e38, np.inf, np.nan, 0.1, 0]
    x = np.asarray([numbers], np.float32)
    x[0, -1] = np.uint32(2**31 - 1).view(np.float32)  # a NaN to which nothing can be added
    rounded, product = run(
        [
            (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), [x]),
            (lambda x: (x.astype(jnp.bfloat16) * 1.01).astype(jnp.float32), [x]),
        ],
        tiles=True,
    )
    exact = x.astype(jnp.bfloat16)  # by NumPy: XLA may leave it out
    np.testing.assert_array_equal(rounded, exact.astype(np.float32))
    np.testing.assert_array_equal(product, (exact * exact.dtype.type(1.01)).astype(np.float32))


@pytest.mark.parametrize("flags", [[], ["-mno-avx512bf16", "-mno-amx-bf16"]], ids=["", "by hand"])
def test_packing_rounds_what_only_tiles_read(flags, monkeypatch):
    if flags and platform.machine() != "x86_64":
        pytest.skip("other CPUs know no such flags")
    monkeypatch.setattr(library, "KERNEL_FLAGS", [*library.KERNEL_FLAGS, *flags])
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, np.inf, -np.inf, 0.1, 0, 0]
    x = np.diag(np.asarray(numbers, np.float32))
    for n, bits in ((7, 2**31 - 1), (8, 0x7F800001)):  # NaN of the largest and the smallest bits
        x[n, n] = np.uint32(bits).view(np.float32)

    def sums(x, turned=False, read=False):
        low = x.astype(jnp.bfloat16)
        column = jnp.ones((len(x), 1), jnp.bfloat16)
        rows = jax.lax.dot(low.T if turned else low, column, preferred_element_type=jnp.float32)
        return rows + jnp.exp(low.astype(jnp.float32)) if read else rows

    library.has_tiles()
    ways = [sums, lambda x: sums(x, turned=True), lambda x: sums(x, read=True)]
    texts = [step_of("step", way, [x], tiles=True)[0] for way in ways]
    assert [text.count("bfloat16_of") for text in texts] == [0, 0, 1]
    with np.errstate(invalid="ignore"):
        exact = np.float32(np.diag(x).astype(jnp.bfloat16))
    for computed in run([(way, [x]) for way in ways[:2]], tiles=True):
        np.testing.assert_array_equal(computed[:, 0], exact)


def random_program(seed):
    """A function of three arrays: 25 operations on random earlier results."""
    rng = np.random.default_rng(seed)
    names = [
        "add",
        "mul",
        "max",
        "exp",
        "sum",
        "scan",
        "back",
        "product",
        "turned",
        "choose",
        "row",
    ]
    plan = [(rng.choice(names), *rng.integers(0, 3 + n, 2)) for n in range(25)]

    def function(x, y, z):
        values = [x, y, z]  # each [ROWS, width]
        for name, first, second in plan:
            a, b = values[first], values[second]
            values.append(
                {
                    "add": lambda a, b: a + b,
                    "mul": lambda a, b: a * jnp.tanh(b),
                    "max": lambda a, b: jnp.maximum(a, b.max(axis=1, keepdims=True) - 1),
                    "exp": lambda a, b: jnp.exp(-jnp.abs(a)) + b[:, :1],
                    "sum": lambda a, b: a / (1 + jnp.abs(b).sum(axis=1, keepdims=True)),
                    "scan": lambda a, b: tile_sum(jnp.tanh(a), True) * 0.1,
                    "back": lambda a, b: tile_sum(jnp.tanh(b), False) * 0.1 + a,
                    "product": lambda a, b: (
                        a * 0.5 + jnp.tanh(a) @ (jnp.tanh(b).T @ jnp.tanh(a)) * 0.05
                    ),
                    "turned": lambda a, b: jnp.tanh(b @ a.T) @ a * 0.1,
                    "choose": lambda a, b: jnp.where((a > b) & (a < 2), a, jnp.where(b > 0, b, 0)),
                    "row": lambda a, b: a + jnp.tanh(b.sum(axis=0, keepdims=True)),
                }[name](a, b)
            )
        return sum(jnp.tanh(value) for value in values[-6:])

    return function


def tile_sum(x, suffix):
    if tile.is_tracing():
        return tile.running_sum(x, suffix)
    return jnp.cumsum(x[:, ::-1], axis=1)[:, ::-1] if suffix else jnp.cumsum(x, axis=1)


def test_random_programs(x64):
    """The schedule keeps what later passes and stages read, whatever the program."""
    functions = [random_program(seed) for seed in range(3)]
    cases = [
        (f, [random(ROWS, width, seed=n) for n in range(3)]) for f in functions for width in (32, 5)
    ]
    for n, ((function, arrays), computed) in enumerate(zip(cases, run(cases), strict=True)):
        exact = jax.jit(function)(*arrays)
        np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-12, err_msg=str(n))


def test_what_is_missing_is_named():
    for function, name in (
        (lambda x: jnp.sort(x), "sort"),
        (lambda x: x**x, "pow"),
        (lambda x: jax.lax.div(8, x.astype(jnp.int32)), "division of integers"),
    ):
        with pytest.raises(NotATile, match=f"kernel has no {name}"):
            step_of("step", function, [random(ROWS, 8)])
