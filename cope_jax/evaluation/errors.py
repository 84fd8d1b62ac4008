"""The loss and the errors of a model on fixed splits."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.data import pipeline
from cope_jax.ops.cross_entropy import cross_entropy
from cope_jax.tasks import Task
from cope_jax.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Errors:
    """What was measured on one split.

    Attributes:
      loss: mean cross entropy of the tokens of weight 1, in nats.
      token_error: share of these tokens that the most probable one misses, in [0, 1].
      sequence_error: share of sequences with any such miss ("exact match" is 1 minus this), in [0, 1].
    """

    loss: float
    token_error: float
    sequence_error: float


class Evaluator:
    """Measures models on fixed splits, all padded to one length, so that one program is compiled for all of them.

    Args:
      task: where the splits come from.
      logits: (params, inputs_BL, positions_BL) → logits_BLV.
      sample_positions: (key, batch, length) → positions_BL; called with each split's own length.
      lift: turns the function of one run into that of several side by side (`Replicas.lift`).
      splits: examples of each split.
      batch_size: sequences at a time.
      data_seed: seed of the examples.
      data_dir: where to read the fixed splits from; None draws them.
      place: puts a batch on the devices.
      multiple: of which the one length must be.
      results: the sharding of what is measured; None leaves it to the compiler.
    """

    def __init__(
        self,
        task: Task,
        logits: Callable[..., Array],
        sample_positions: Callable[..., Any],
        lift: Callable[..., Any],
        splits: Mapping[str, int],
        *,
        batch_size: int,
        data_seed: int,
        data_dir: str | None = None,
        place: Callable[[Mapping[str, Any]], Any] = lambda batch: batch,
        multiple: int = 1,
        results: Any = None,
    ):
        longest = max((task.length(split) for split in splits), default=0)
        length = longest + -longest % multiple
        key = jax.random.key(data_seed)
        self._batches: dict[str, list[dict[str, Any]]] = {}
        for split, examples in splits.items():
            batches = pipeline.evaluation_batches(
                task,
                split,
                examples=examples,
                batch_size=batch_size,
                seed=data_seed,
                data_dir=data_dir if split in task.splits else None,
            )
            self._batches[split] = []
            for number, batch in enumerate(batches):
                positions_BL = sample_positions(jax.random.fold_in(key, number), *batch["inputs"].shape)
                self._batches[split].append({**_pad(batch, length), "positions": _repeat_last(positions_BL, length)})

        def measure(params: PyTree, batch: Mapping[str, Array]) -> dict[str, Array]:
            return batch_sums(logits(params, batch["inputs"], batch["positions"]), batch)

        self._measure = jax.jit(lift(measure, shared=1), out_shardings=results)
        self._place = place

    def __call__(
        self, params: PyTree, splits: Iterable[str] | None = None, examples: int | None = None
    ) -> dict[str, list[Errors]]:
        """The errors on each split, one for each run side by side.

        Args:
          params: the parameters, with a leading axis where runs are side by side.
          splits: which; None takes all.
          examples: bound on the examples of each split, rounded up to whole batches; None takes all.
        """
        splits = self._batches if splits is None else splits
        return {split: self._errors(params, self._batches[split], examples) for split in splits}

    def _errors(self, params: PyTree, batches: Sequence[Mapping[str, Any]], examples: int | None) -> list[Errors]:
        if examples is not None:
            batches = batches[: -(-examples // len(batches[0]["inputs"]))]
        sums = [jax.device_get(self._measure(params, self._place(batch))) for batch in batches]
        width = np.atleast_1d(sums[0]["tokens"]).size
        return [
            mean_errors([{k: np.atleast_1d(v)[run] for k, v in batch.items()} for batch in sums])
            for run in range(width)
        ]


def batch_sums(logits_BLV: Array, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Sums over one batch, from which `mean_errors` makes means. Rows of weight 0 do not count."""
    weights_BL = batch["weights"]
    wrong_BL = weights_BL * (jnp.argmax(logits_BLV, axis=-1) != batch["targets"]).astype(weights_BL.dtype)
    return {
        "loss": jnp.sum(weights_BL * cross_entropy(logits_BLV, batch["targets"])),
        "wrong_tokens": jnp.sum(wrong_BL),
        "tokens": jnp.sum(weights_BL),
        "wrong_sequences": jnp.sum(jnp.any(wrong_BL > 0, axis=1).astype(jnp.float32)),
        "sequences": jnp.sum(jnp.any(weights_BL > 0, axis=1).astype(jnp.float32)),
    }


def mean_errors(sums: Iterable[Mapping[str, Any]]) -> Errors:
    """The means over batches, summed in float64."""
    totals: dict[str, float] = {}
    for batch in sums:
        for name, value in batch.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return Errors(
        loss=totals["loss"] / totals["tokens"],
        token_error=totals["wrong_tokens"] / totals["tokens"],
        sequence_error=totals["wrong_sequences"] / totals["sequences"],
    )


def _pad(batch: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Tokens 0 of weight 0 behind each row: no earlier token of a causal model sees them."""
    return {name: np.pad(value, ((0, 0), (0, length - value.shape[1]))) for name, value in batch.items()}


def _repeat_last(positions_BL: Any, length: int) -> np.ndarray:
    """The positions of a padded sequence: behind the end anything in range will do."""
    positions_BL = np.asarray(positions_BL)
    return np.pad(positions_BL, ((0, 0), (0, length - positions_BL.shape[1])), mode="edge")
