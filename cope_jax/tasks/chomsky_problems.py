"""The fifteen problems of the Chomsky hierarchy suite, as functions (rng, n) → (input, output).

Delétang et al., "Neural Networks and the Chomsky Hierarchy", arXiv:2207.02098.
"""

import math
from collections.abc import Callable

import numpy as np

MODULUS = 5

Problem = Callable[[np.random.Generator, int], tuple[str, str]]


def _bits(rng: np.random.Generator, n: int) -> str:
    return "".join(map(str, rng.integers(2, size=n)))


def _even_pairs(rng: np.random.Generator, n: int) -> tuple[str, str]:
    bits = _bits(rng, n)
    return bits, str((bits.count("01") + bits.count("10")) % 2)


def _parity_check(rng: np.random.Generator, n: int) -> tuple[str, str]:
    bits = _bits(rng, n)
    return bits, str(bits.count("1") % 2)


def _cycle_navigation(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """0 is a step back, 1 none, 2 a step forward, in a circle of five places."""
    steps = rng.integers(3, size=n)
    return "".join(map(str, steps)), str(int((steps - 1).sum()) % MODULUS)


def _modular_arithmetic(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """Digits and operators in turn; without brackets, products come first."""
    digits = rng.integers(MODULUS, size=(n + 1) // 2)
    operators = rng.integers(3, size=n // 2)
    text = str(digits[0])
    terms = [int(digits[0])]
    for operator, digit in zip(operators, digits[1:], strict=False):
        text += "+-*"[operator] + str(digit)
        if operator == 2:
            terms[-1] *= int(digit)
        else:
            terms.append(int(digit) if operator == 0 else -int(digit))
    return text, str(sum(terms) % MODULUS)


def _expression(rng: np.random.Generator, n: int, operators: str) -> tuple[str, int]:
    """An expression with brackets of exactly n symbols, and its value."""
    if n <= 2:
        digit = int(rng.integers(MODULUS))
        return (str(digit), digit) if n == 1 else (f"-{digit}", -digit)
    if n <= 4:
        text, value = _expression(rng, n - 2, operators)
        return f"({text})", value
    left = int(rng.integers(1, n - 3))
    a, x = _expression(rng, left, operators)
    b, y = _expression(rng, n - 3 - left, operators)
    operator = operators[int(rng.integers(len(operators)))]
    value = {"+": x + y, "-": x - y, "*": x * y}[operator]
    return f"({a}{operator}{b})", value % MODULUS


def _modular_arithmetic_brackets(rng: np.random.Generator, n: int) -> tuple[str, str]:
    text, value = _expression(rng, n, "+-*")
    return text, str(value % MODULUS)


def _solve_equation(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """One digit of an expression is x; `:` and the value of the expression follow."""
    text, value = _expression(rng, n - 2, "+-")
    index = int(rng.choice([index for index, symbol in enumerate(text) if symbol.isdecimal()]))
    return f"{text[:index]}x{text[index + 1 :]}:{value % MODULUS}", text[index]


def _stack_manipulation(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """A stack, then pops (2) and pushes of 0 (3) and 1 (4); answers: the stack from its top, 2."""
    size = int(rng.integers(1, n))
    stack, actions = list(_bits(rng, size)), rng.integers(2, 5, size=n - size)
    text = "".join([*stack, *map(str, actions)])
    for action in actions:
        if action > 2:
            stack.append(str(action - 3))
        elif stack:
            stack.pop()
    return text, "".join(reversed(stack)) + "2"


def _reverse_string(rng: np.random.Generator, n: int) -> tuple[str, str]:
    bits = _bits(rng, n)
    return bits, bits[::-1]


def _duplicate_string(rng: np.random.Generator, n: int) -> tuple[str, str]:
    bits = _bits(rng, n)
    return bits, bits + bits


def _missing_duplicate_string(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """A string twice, with one place hidden by 2; if n is odd, 3 fills the end."""
    word = _bits(rng, n // 2)
    twice, hidden = word + word, int(rng.integers(2 * len(word)))
    return (twice[:hidden] + "2" + twice[hidden + 1 :]).ljust(n, "3"), twice[hidden]


def _odds_first(rng: np.random.Generator, n: int) -> tuple[str, str]:
    bits = _bits(rng, n)
    return bits, bits[::2] + bits[1::2]


def _operands(rng: np.random.Generator, n: int) -> tuple[int, int, str]:
    """Two numbers from 1 on, and both in binary, least significant bit first, separated by 2."""
    width = int(rng.integers(1, n - 1))
    widths = (width, n - 1 - width)
    a, b = (int("".join(reversed(bits)), 2) for bits in (_positive(rng, size) for size in widths))
    bits = (_little(number, size) for number, size in zip((a, b), widths, strict=True))
    return a, b, "2".join(bits)


def _positive(rng: np.random.Generator, size: int) -> str:
    """Bits of a number from 1 to 2^size − 1, all equally probable."""
    while "1" not in (bits := _bits(rng, size)):
        pass
    return bits


def _little(number: int, size: int = 0) -> str:
    """The bits of a number, the least significant first, with zeros up to `size`."""
    return f"{number:b}"[::-1].ljust(size, "0")


def _binary_addition(rng: np.random.Generator, n: int) -> tuple[str, str]:
    a, b, text = _operands(rng, n)
    return text, _little(a + b) + "2"


def _binary_multiplication(rng: np.random.Generator, n: int) -> tuple[str, str]:
    a, b, text = _operands(rng, n)
    return text, _little(a * b) + "2"


def _compute_sqrt(rng: np.random.Generator, n: int) -> tuple[str, str]:
    """The whole part of the root, both with the most significant bit first."""
    bits = _bits(rng, n)
    return bits, f"{math.isqrt(int(bits, 2)):b}".rjust((n + 1) // 2, "0")


def _bucket_sort(rng: np.random.Generator, n: int) -> tuple[str, str]:
    symbols = "".join(map(str, rng.integers(MODULUS, size=n)))
    return symbols, "".join(sorted(symbols))


def _one(n: int) -> int:
    del n
    return 1


PROBLEMS: dict[str, tuple[Problem, int, Callable[[int], int]]] = {
    "even_pairs": (_even_pairs, 1, _one),
    "parity_check": (_parity_check, 1, _one),
    "cycle_navigation": (_cycle_navigation, 1, _one),
    "modular_arithmetic": (_modular_arithmetic, 1, _one),
    "modular_arithmetic_brackets": (_modular_arithmetic_brackets, 1, _one),
    "solve_equation": (_solve_equation, 3, _one),
    "stack_manipulation": (_stack_manipulation, 2, lambda n: n + 1),
    "reverse_string": (_reverse_string, 1, lambda n: n),
    "duplicate_string": (_duplicate_string, 1, lambda n: 2 * n),
    "missing_duplicate_string": (_missing_duplicate_string, 2, _one),
    "odds_first": (_odds_first, 1, lambda n: n),
    "binary_addition": (_binary_addition, 3, lambda n: n + 1),
    "binary_multiplication": (_binary_multiplication, 3, lambda n: n + 1),
    "compute_sqrt": (_compute_sqrt, 1, lambda n: (n + 1) // 2),
    "bucket_sort": (_bucket_sort, 1, lambda n: n),
}
"""Each problem with its smallest n, and the largest length of its output."""
