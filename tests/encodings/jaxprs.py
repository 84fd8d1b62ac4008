"""Intermediate results and primitives of a function, with each of `cope_jax.ops` as one step."""

import functools
import importlib
import pkgutil
import sys
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from cope_jax import encodings, ops


def intermediates(function: Any, *arguments: Any) -> list[np.ndarray]:
    """All values that a function of arrays computes on the way, in order."""
    closed = jax.make_jaxpr(function)(*arguments)
    seen: list[np.ndarray] = []

    def run(jaxpr: Any, consts: Any, values: Any) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        for equation in jaxpr.eqns:
            inputs = [v.val if isinstance(v, Literal) else known[v] for v in equation.invars]
            inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
            if (
                equation.primitive.name in ("jit", "pjit", "custom_jvp_call", "closed_call")
                and inner is not None
            ):
                results = run(inner.jaxpr, inner.consts, inputs)
            else:
                results = equation.primitive.bind(*inputs, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
            known.update(zip(equation.outvars, results, strict=True))
            seen.extend(np.asarray(result) for result in results)
        return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]

    run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
    return seen


def mask_ops(monkeypatch: Any) -> None:
    """Makes each op that an encoding's module has a call named `ops`, into which `primitives` does
    not look.
    """
    functions = {
        function
        for module in pkgutil.iter_modules(ops.__path__)
        for function in vars(importlib.import_module(f"{ops.__name__}.{module.name}")).values()
        if callable(function) and getattr(function, "__module__", "").startswith(ops.__name__)
    }
    for loaded in [
        module for name, module in sys.modules.items() if name.startswith(f"{encodings.__name__}.")
    ]:
        for name, value in list(vars(loaded).items()):
            if callable(value) and value in functions:

                def ops_call(*arguments: Any, function: Any = value, **options: Any) -> Any:
                    return function(*arguments, **options)

                monkeypatch.setattr(loaded, name, functools.wraps(ops_call)(jax.jit(ops_call)))


def primitives(function: Any, *arguments: Any) -> set[str]:
    """The names of all primitives of a function outside of ops."""
    names: set[str] = set()

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.params.get("name") == "ops_call":
                continue
            names.add(equation.primitive.name)
            for value in jax.tree.leaves(
                equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return names
