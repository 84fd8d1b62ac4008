"""Lets lm-evaluation-harness (EleutherAI) measure a decoder: likelihoods of texts, and generation.

The conventions are those of the harness, so that results can be compared with those of other
programs:

- A context that does not fit is cut on the left.
- A text is read in windows of L tokens, one after the other. The last window is moved back so that
  it is full, and only its new tokens count.
- Generation takes the most probable token, unless a task asks for sampling.

As in training and in `generate`, the token `begin` precedes each context and each text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cope_jax import models
from cope_jax.corpora.packing import Pieces, fit
from cope_jax.corpora.text_units import Counts
from cope_jax.errors import ConfigError
from cope_jax.evaluation.text.likelihood import Windows, check_length, measure
from cope_jax.generation import text_model
from cope_jax.generation.decoding import generate_stream
from cope_jax.generation.detokenizer import Continuation
from cope_jax.generation.sampling import row_keys
from cope_jax.progress import Progress
from cope_jax.registry import check_at_least
from cope_jax.runs.load import load as load_folder
from cope_jax.runs.records import Record
from cope_jax.tasks.stored import TextTask
from cope_jax.tokenizers.tokenizer import Codec

NEW_TOKENS = 256
"""Maximum number of new tokens if a task does not set it; at most half of the model's length."""
# The first that is set counts.
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_PER_UNIT = {
    "word_perplexity": "perplexity",
    "byte_perplexity": "bits_per_byte",
    "bits_per_byte": "bits_per_byte",
}
"""Metrics of the harness, and the results of `Counts` that stand or fall with them."""
_CHUNK = 8  # tokens that are generated before stop texts are looked for


class HarnessModel:
    """The three kinds of requests of lm-evaluation-harness, for a decoder with its tokenizer.

    A request is an object with `args`, a tuple, and `task_name`. Requests are sorted and packed, so
    the number of compiled programs does not grow with the number of requests, and a result does not
    depend on the other requests.

    Args:
      model: a decoder.
      codec: its tokenizer.
      length: L, the maximum number of tokens that the model reads at once.
      ends: the tokens that end a generated text, besides stop texts and the number of tokens.
      batch_size: the number of rows of L tokens in a batch, and the number of texts that are
        generated side by side.

    Attributes:
      lost: what the tokenizer loses of complete texts: task → (words, texts with other bytes), as
        in `Tokenizer.lost`.

    Raises:
      ConfigError: a number is too small, or a table of the encoding has fewer than L positions.
    """

    def __init__(
        self,
        model: Any,
        codec: Codec,
        length: int,
        *,
        ends: Sequence[int] = (),
        batch_size: int = 16,
    ):
        check_at_least(1, "harness", length=length, batch_size=batch_size)
        check_length(model, length)
        self.lost: dict[str, tuple[int, int]] = {}
        self._model, self._codec, self.length = model, codec, length
        self._ends, self._rows = [*ends], batch_size

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Measures the continuations of (context, continuation).

        Returns:
          For each request, log p(continuation | context) in nats, and whether each token of the
          continuation is the most probable one.

        Raises:
          ConfigError: a continuation is longer than L tokens, or a likelihood is not finite.
        """
        parts = [self._split(*request.args) for request in requests]
        return self._score(parts, "loglikelihood")

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Measures complete texts, (text,), in windows of L tokens; returns log p(text) in nats.

        Raises:
          ConfigError: a likelihood is not finite.
        """
        texts = []
        for request in requests:
            (text,) = request.args
            tokens = self._tokens(text)
            words, changed = self._codec.lost(text, tokens[len(self._codec.begin) :])
            before = self.lost.get(request.task_name, (0, 0))
            self.lost[request.task_name] = before[0] + words, before[1] + changed
            texts.append(_windows(tokens, self.length))
        windows = [window for text in texts for window in text]
        results = iter(self._score(windows, "loglikelihood_rolling"))
        return [sum(next(results)[0] for _ in text) for text in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continues the contexts of (context, settings).

        The settings are a dict: `until`, one or several stop texts; `max_gen_toks`; `do_sample`,
        `temperature`, `top_k` and `top_p`.

        Returns:
          For each request, the text before the first stop text.

        Raises:
          ConfigError: a setting is wrong or not supported, or the new tokens leave no room for a
            context.
        """
        groups: dict[_Settings, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_Settings.read(request.args[1], self.length), []).append(number)
        texts = [""] * len(requests)
        with Progress(len(requests), "text", label="generate_until", leave=False) as progress:
            for settings, numbers in groups.items():
                room = self.length - settings.new_tokens
                prompts = {n: self._tokens(requests[n].args[0])[-room:] for n in numbers}
                order = sorted(numbers, key=lambda number: -len(prompts[number]))
                for start in range(0, len(order), self._rows):
                    batch = order[start : start + self._rows]
                    chosen = [prompts[number] for number in batch]
                    rows = self._generate(chosen, batch, settings, room)
                    for number, text in zip(batch, rows, strict=True):
                        texts[number] = text
                    progress.advance(len(batch))
        return texts

    def _tokens(self, text: str) -> np.ndarray:
        return np.array([*self._codec.begin, *self._codec.encode(text)], np.int32)

    def _split(self, context: str, continuation: str) -> tuple[np.ndarray, int]:
        """The tokens of context and continuation, cut on the left, and the number that counts."""
        bare = context.rstrip()  # spaces belong to the next word, as tokenizers have it
        continuation = context[len(bare) :] + continuation
        before, whole = self._tokens(bare), self._tokens(bare + continuation)
        # A token across the border would leave nothing to measure.
        after = (
            whole[len(before) :] if len(whole) > len(before) else self._codec.encode(continuation)
        )
        if len(after) > self.length:
            raise ConfigError(
                f"a continuation has {len(after)} tokens, but the model reads {self.length}: {continuation[:40]!r}; "
                "ask for a greater length, or leave this task out"
            )
        return np.concatenate([before, after])[-self.length - 1 :], len(after)

    def _score(
        self, parts: Sequence[tuple[np.ndarray, int]], label: str
    ) -> list[tuple[float, bool]]:
        """Measures the last `count` tokens of each (tokens, count): see `loglikelihood`."""
        kept = [number for number, (_, count) in enumerate(parts) if count]
        results = [(0.0, True)] * len(parts)
        if not kept:
            return results
        lengths = np.array([len(parts[number][0]) for number in kept])
        sizes, starts = lengths - 1, np.cumsum(lengths) - lengths
        pieces = Pieces(starts, sizes, sizes - np.array([parts[number][1] for number in kept]))
        width = min(self.length, _power_of_two(int(sizes.max())))
        tokens = np.concatenate([parts[number][0] for number in kept])
        windows = Windows(tokens, pieces, fit(sizes.tolist(), width), width)
        nats, _, best = measure(self._model, windows, self._rows, label)
        for row, number in enumerate(kept):
            counted = slice(starts[row] + pieces.context[row], starts[row] + sizes[row])
            if not np.isfinite(nats[counted]).all():
                raise ConfigError(
                    "a likelihood is not finite: the model has diverged, use an earlier checkpoint"
                )
            results[number] = -float(nats[counted].sum()), bool(best[counted].all())
        return results

    def _generate(
        self,
        prompts: Sequence[np.ndarray],
        numbers: Sequence[int],
        settings: "_Settings",
        room: int,
    ) -> list[str]:
        """Continues one batch. `numbers` are those of the requests."""
        decode, until = self._codec.decode, settings.until
        rows = [Continuation(decode, prompt.tolist(), until) for prompt in prompts]
        # The last row again, so that each batch has the same shape.
        missing = self._rows - len(prompts)
        parts = generate_stream(
            self._model,
            [prompt.tolist() for prompt in [*prompts, *[prompts[-1]] * missing]],
            settings.new_tokens,
            chunk=_CHUNK,
            key=row_keys(jax.random.key(0), [*numbers, *[numbers[-1]] * missing]),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            stop_token=self._ends,
            size=self._codec.size,
            padded=min(room, _power_of_two(max(map(len, prompts)))),
        )
        for tokens_of_rows in parts:
            for row, tokens in zip(rows, tokens_of_rows[: len(rows)], strict=True):
                row.add(tokens[~np.isin(tokens, self._ends)])
            if all(row.ended for row in rows):
                break
        for row in rows:
            row.finish()
        return [row.text for row in rows]


def load(
    folder: str | Path,
    seed: int | None = None,
    length: int | None = None,
    batch_size: int | None = None,
) -> HarnessModel:
    """Loads a decoder from a folder with a run on text, or with an exported or published model.

    Args:
      folder: as for `cope_jax.load`.
      seed: which seed of a run; the first one if None.
      length: L; the length of training, or the maximum length of a published model, if None.
      batch_size: rows in a batch. If None, a batch has about as many tokens as one of the run's
        evaluation, or 16 rows.

    Raises:
      ConfigError: there is no such model, or its text has no probability.
    """
    loaded = load_folder(folder)
    if loaded.name not in models.able("score") or not (
        loaded.task is None or isinstance(loaded.task, TextTask)
    ):
        task = "" if loaded.task is None else f" on {loaded.task.name}"
        raise ConfigError(f"{folder} holds a {loaded.name}{task}: choose a decoder of text")
    generator = text_model.load(folder, seed)
    length = generator.length if length is None else length
    if batch_size is None:
        tokens = (
            0
            if loaded.experiment is None
            else loaded.experiment.evaluation.batch_size * generator.length
        )
        batch_size = max(1, tokens // length) if tokens else 16
    codec = generator.codec
    ends = codec.ends or codec.begin
    return HarnessModel(generator.model, codec, length, ends=ends, batch_size=batch_size)


def as_lm(model: HarnessModel) -> Any:
    """Wraps a model in a subclass of the harness's `LM`, for `lm_eval.simple_evaluate(model=…)`.

    Raises:
      ConfigError: lm_eval is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ModuleNotFoundError as error:
        raise ConfigError("lm_eval is not installed: pip install 'cope-jax[harness]'") from error

    class Adapter(LM):
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return model.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return model.loglikelihood_rolling(requests)

        def generate_until(self, requests: Any) -> list[str]:
            return model.generate_until(requests)

    return Adapter()


def records(
    measured: Mapping[str, Any], lost: Mapping[str, tuple[int, int]]
) -> tuple[list[Record], dict[str, str]]:
    """Makes a record for each metric of each task or group, except those of another text.

    Args:
      measured: the results of `lm_eval.simple_evaluate`.
      lost: `HarnessModel.lost` after it. A group has lost what all tasks have.

    Returns:
      The records, and for tasks and groups of which figures are left out, which and why.
    """
    results, groups = measured["results"], measured.get("groups", {})
    rows: list[Record] = []
    left_out: dict[str, str] = {}
    for task, values in sorted({**results, **groups}.items()):
        sums = [
            pair
            for name, pair in lost.items()
            if name == task or task in groups or name not in results
        ]
        counts = Counts(1, 1, 1, *map(sum, zip(*sums, strict=True)))
        kept = counts.per_unit(0.0)
        for name, value in values.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if _PER_UNIT.get(metric, "loss") not in kept:
                left_out[task] = counts.left_out
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, int | float) else math.nan,
                }
            )
    return rows, left_out


class _Settings(NamedTuple):
    """The settings of a request for text."""

    until: tuple[str, ...]
    new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None

    @classmethod
    def read(cls, values: Mapping[str, Any], length: int) -> "_Settings":
        """Reads settings of a request to a model of `length` tokens. ConfigError: a wrong one."""
        known = {"until", "do_sample", "temperature", "top_k", "top_p", *_COUNTS}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(
                f"a task sets {', '.join(unknown)} for generation: choose from {', '.join(sorted(known))}"
            )
        until = values.get("until") or ()
        given = (values[name] for name in _COUNTS if values.get(name) is not None)
        sampled = values.get("do_sample")
        temperature = values.get("temperature", 1.0 if sampled else 0.0)
        settings = cls(
            until=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            new_tokens=_number(
                "max_gen_toks", next(given, max(1, min(NEW_TOKENS, length // 2))), int
            ),
            temperature=0.0 if sampled is False else _number("temperature", temperature, float),
            # 0 stands for all tokens.
            top_k=_number("top_k", values.get("top_k") or 0, int) or None,
            top_p=None if values.get("top_p") is None else _number("top_p", values["top_p"], float),
        )
        if not 1 <= settings.new_tokens < length:
            raise ConfigError(
                f"a task asks for max_gen_toks={settings.new_tokens}, but the model reads {length} tokens: set it from "
                f"1 to {length - 1}, or ask for a greater length"
            )
        return settings


def _number(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"a task sets {name}={value!r} for generation: set a number") from error


def _windows(tokens: np.ndarray, length: int) -> Iterable[tuple[np.ndarray, int]]:
    """The windows of a text, as (tokens, number of last tokens that count): see the module.

    >>> [(tokens.tolist(), count) for tokens, count in _windows(np.arange(7), 4)]
    [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2)]
    """
    ends = [*range(length, len(tokens) - 1, length), len(tokens) - 1]
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return [(tokens[max(0, end - length) : end + 1], end - begin) for begin, end in pairs]


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 16."""
    return max(16, 1 << (number - 1).bit_length())
