"""Attention, forward and with all gradients, over lengths."""

import functools
from collections.abc import Sequence

from experiments.benchmarks import contenders
from experiments.benchmarks.case import Case
from experiments.benchmarks.problem import Problem


def cases(problems: Sequence[Problem], names: Sequence[str], reference: str) -> list[Case]:
    """One case for each problem."""
    return [
        Case(
            {"section": "attention", **problem.fields()},
            {name: functools.partial(contenders.find(name), problem) for name in names},
            reference,
            cost=problem.length**2,
        )
        for problem in problems
    ]
