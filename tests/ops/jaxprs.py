"""The operations of a function, from its trace."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def equations(function: Callable[..., Any], *arguments: Any) -> list[JaxprEqn]:
    """The equations of a function's trace, those of its loops and inner functions included."""

    def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jaxprs_in_params(equation.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))
