"""`check` measures a function by every law."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.testing.inputs import Draw, Inputs, qkv
from cope_jax.testing.leaks import changes
from cope_jax.testing.measures import LAWS, Unchecked
from cope_jax.testing.results import CallError
from cope_jax.testing.subject import Adapter, Subject, checked_subject
from cope_jax.testing.torch_functions import wrapped
from cope_jax.testing.verdicts import Report, Verdict

HINTS = {
    "causal": "the function is not causal",
    "segments": 'pass segments="KEYWORD" (document ids)',
    "positions": 'pass positions="KEYWORD"',
    "padding": 'pass padding="KEYWORD" (True at tokens)',
    "mask": 'pass mask="KEYWORD" (True where a token is seen)',
    "step": "pass step=function (cache, *arrays) -> (out, cache)",
    "blocks": "pass blocks=[{KEYWORD: another size}] or functions",
    "devices": "pass devices=function over several devices",
    "reference": "pass reference=function that is right",
    "shift": "pass shift=100 if only distances matter",
    "bfloat16": "pass bfloat16=True if inputs may be bfloat16",
}


def check(
    function: Callable[..., Any],
    inputs: Inputs | Draw | None = None,
    *,
    causal: bool = True,
    segments: Adapter | None = None,
    positions: Adapter | None = None,
    padding: Adapter | None = None,
    mask: Adapter | None = None,
    step: Callable[..., Any] | None = None,
    blocks: Sequence[Any] | None = None,
    devices: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
    gradients: Callable[..., Any] | None = None,
    shift: int | None = None,
    lengths: Sequence[int] | None = None,
    bfloat16: bool = False,
    length: int = 16,
    batch: int = 4,
    tolerance: float | None = None,
    seed: int = 0,
    laws: Iterable[str] | None = None,
) -> Report:
    """Measures a function by every law that it can be measured by.

    The function takes NumPy arrays `[B, L, …]` and returns an array `[B, L, …]`; of a tuple, the first
    counts, and of a result with `logits` these. JAX functions and Flax modules do as they are;
    modules of PyTorch too, and functions by `from_torch`.

    >>> def mean(q, k, v):  # sees later tokens
    ...     return v - v.mean(axis=1, keepdims=True)
    >>> print(check(mean, laws=["causality", "packed documents"]))
    law               verdict      error  bound
    causality         BROKEN        0.92  4e-05  token 5 changes output 0 by 0.2
    packed documents  not checked                pass segments="KEYWORD" (document ids)

    Args:
      function: the function under test.
      inputs: `qkv(…)`, the default, for attention; `vectors(width)` for a layer; `tokens(vocab)`
        for a language model; or a function (generator, batch, length) -> arrays `[B, L, …]`.
      causal: whether an output may depend only on its own token and earlier ones.
      segments: the keyword that takes document ids int32 `[B, L]`, or a function from these ids to
        a dict of keywords. Equal ids are of one document; ids are 1, 2, ….
      positions: the same for positions int32 `[B, L]`. The laws of documents and padding give it
        positions that count from the first token of each.
      padding: the same for a mask bool `[B, L]`, True at tokens and False at padding.
      mask: the same for a mask bool `[B, 1, L, L]`, True where an output may see a token.
      step: (cache, *arrays, **keywords) -> (out, cache), which reads the next tokens; the first
        cache is None. It gets the positions of these tokens, and the padding of all so far. `out`
        may have the outputs of the last tokens only.
      blocks: dicts of keywords for other sizes of blocks, or functions of the same arguments.
      devices: a function of the same arguments that computes on several devices.
      reference: a function of the same arguments that is right.
      gradients: (arrays, dout, **keywords) -> a list of the gradients of Σ dout·out by each array,
        None for integers; or a dict, also of parameters by name. If None, JAX computes them;
        `from_torch` has its own.
      shift: a number that positions may be shifted by without effect.
      lengths: lengths to try, for the law of length. If None, 1 and ⌊`length`/2⌋ + 1.
      bfloat16: whether to compare inputs in bfloat16 with float64.
      length: the number of tokens.
      batch: the number of examples of a call, at least 2.
      tolerance: the largest error of an output; of a gradient ten times this. If None, 100 roundings
        of the largest output, or of 16 bits 20; where nothing may change at all, 4.
      seed: the seed of all random numbers.
      laws: names of laws, if not all.

    Returns:
      the verdicts. `print` shows a table, and `raise_if_broken()` raises AssertionError.

    Raises:
      ConfigError: the function cannot be called, is random, or ignores its inputs; a law is unknown.
    """
    if isinstance(laws, str):
        raise ConfigError(f"laws must be a list of names, got {laws!r}: pass [{laws!r}]")
    names = list(LAWS) if laws is None else list(laws)
    if not names:
        raise ConfigError("laws must be a list of at least one name, or None for all")
    for name in names:
        if name not in LAWS:
            raise unknown("law", name, LAWS)
    if not callable(function):
        raise ConfigError(f"check takes a function, got {type(function).__name__}")
    if not (inputs is None or isinstance(inputs, Inputs) or callable(inputs)):
        raise ConfigError(
            "inputs must be qkv(…), vectors(width), tokens(vocab), or a function (generator, batch, "
            f"length) -> arrays, got {type(inputs).__name__}"
        )
    if blocks is not None and (not isinstance(blocks, list | tuple) or not blocks):
        raise ConfigError(
            f"blocks must be a list of at least one dict of keywords or function, got {blocks!r}"
        )
    hint = "; pass tokens(vocab) for a language model, vectors(width) for a layer"
    subject = checked_subject(
        hint=hint if inputs is None else "",
        function=wrapped(function),
        inputs=inputs
        if isinstance(inputs, Inputs)
        else qkv()
        if inputs is None
        else Inputs(inputs),
        causal=causal or None,
        segments=segments,
        positions=positions,
        padding=padding,
        mask=mask,
        step=step,
        blocks=None if blocks is None else [wrapped(other) for other in blocks],
        devices=wrapped(devices),
        reference=wrapped(reference),
        gradients=gradients,
        shift=shift,
        lengths=lengths,
        bfloat16=bfloat16 or None,
        length=length,
        batch=batch,
        tolerance=tolerance,
        seed=seed,
    )
    if subject.inputs.heads is not None and not _reads_tokens(subject):
        raise ConfigError(
            "no output depends on another token, so this is no attention over axis 1: arrays are [B, L, heads, width]; "
            "swap axes 1 and 2 of q, k, v and the result for a function of PyTorch"
        )
    return Report(subject.name, tuple(verdict_of(name, subject) for name in names))


def verdict_of(name: str, subject: Subject) -> Verdict:
    """Returns the verdict of a law."""
    measure, needs = LAWS[name]
    missing = [HINTS[need] for need in needs if getattr(subject, need) is None]
    if missing:
        return Verdict(name, "not checked", counterexample="; ".join(missing))
    try:
        error, bound, text, leaking = measure(subject)
    except Unchecked as reason:
        return Verdict(name, "not checked", counterexample=str(reason))
    except CallError as failure:
        return Verdict(name, "failed", counterexample=str(failure))
    if error <= bound:
        return Verdict(name, "holds", error, bound)
    return Verdict(name, "BROKEN", error, bound, text, leaking)


def _reads_tokens(subject: Subject) -> bool:
    """True if an output at an odd token depends on even tokens."""
    even = np.arange(subject.length) % 2 == 0
    return bool((changes(subject, [even])[0, ~even] > subject.leak_bound).any())
