"""The laws of caches: reading token after token."""

from typing import Any

from cope_jax.testing.arrangements import left_mask, padded, shifted
from cope_jax.testing.laws import aligned, unpadded, worse
from cope_jax.testing.measures import Measure, law
from cope_jax.testing.results import Array, CallError, clear_errors, to_numpy
from cope_jax.testing.subject import Subject


@law("decoding", "step")
def decoding(subject: Subject) -> Measure:
    """Reading token after token with a cache gives what reading all tokens gives.

    step(… step(x_1 … x_m), x_{m+1} …) = f(x).
    """
    outs = read(subject, subject.draws[0], subject.length // 2, subject.out)
    return worse(Measure(0.0, subject.bound), subject, outs, subject.out, "reading all at once")


@law("left padding and cache", "step", "padding")
def left_padding_and_cache(subject: Subject) -> Measure:
    """Prompts with left padding, then token after token: each example is as if alone."""
    half = subject.length // 2
    mask = left_mask(subject, half - 1)
    arrays = [shifted(array, mask) for array in subject.draws[0]]
    expected = shifted(unpadded(subject, mask), mask)
    outs = read(subject, arrays, half, expected, **padded(mask))
    return aligned(Measure(0.0, subject.bound), subject, outs, mask)


def read(subject: Subject, arrays: Any, prompt: int, outs: Array, **data: Any) -> Array:
    """Reads a prompt and then token after token, and puts the outputs into a copy of `outs`.

    `step` may return outputs of all tokens that it reads, or of the last ones only.
    """
    outs, cache = outs.copy(), None
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, subject.length))]:
        some = [array[:, start:end] for array in arrays]
        seen = {name: a[:, 0 if name == "padding" else start : end] for name, a in data.items()}
        keywords = subject.keywords(**seen)
        with clear_errors(f"step for the tokens {start} to {end - 1}", some, keywords):
            result = subject.step(cache, *some, **keywords)  # type: ignore[misc]
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise CallError(f"step must return (out, cache), got {type(result).__name__}")
            out, cache = result
            rows = to_numpy(out)
            rows = rows[:, None] if rows.ndim < outs.ndim else rows
            first = max(end - rows.shape[1], start)
            if rows.shape != outs[:, first:end].shape:
                raise CallError(
                    f"step returned shape {list(rows.shape)} for the tokens {start} to {end - 1}, "
                    f"and the function {list(outs.shape)} for all: give outputs of some of the last"
                )
            outs[:, first:end] = rows
    return outs
