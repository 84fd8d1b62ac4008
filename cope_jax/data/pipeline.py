"""Makes batches with Grain: training batches that resume exactly, evaluation batches of one shape.

Batches depend on seeds only, not on timing: Grain's prefetching threads keep the order.
"""

import functools
import sys
import zlib
from collections.abc import Sequence

import grain
import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.tasks.stored import Blocks, StoredTask
from cope_jax.tasks.task import Batch, Task

_AHEAD = 4  # batches that each reader may be ahead
_ENDLESS = sys.maxsize


def train_iterator(
    task: Task,
    *,
    batch_size: int,
    examples: int | None,
    data_seed: int,
    shuffle_seed: int,
    data_dir: str | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    readers: int = 1,
) -> grain.DatasetIterator:
    """Creates an endless iterator over training batches.

    With `examples`, or for a task of fixed size, the iterator gives the fixed train split, which
    depends only on `data_seed`. The order of examples depends on `shuffle_seed` and changes with
    each epoch; a batch may span two epochs. For any other task without `examples`, the iterator
    samples new examples without end. Batch i then depends only on both seeds and i.

    Each part of a mixture is shuffled and repeated in this way, and the parts alternate in
    proportion to their weights.

    If the train split is a stream, the iterator repeats the batches of the stream in order, for any
    seeds.

    If `data_dir` is given, the examples come from there, where `cope_jax.data.tfds_builder.write`
    stored the fixed split. The batches are bit-identical to batches from memory. `rows` are the
    rows of each batch that this process needs. If `rows` is None, the process needs all rows.
    `readers` is the number of threads that read batches ahead. The batches and `get_state()` do not
    depend on this number.

    Returns:
      An iterator over `Batch`es. `get_state()` is a small JSON-like dict, and `set_state` resumes
      exactly from this state. The state counts batches, so the state is the same for any `rows`.

    Raises:
      ConfigError: a size or seed is out of range, or `data_dir` does not contain these examples.

    >>> from cope_jax import tasks
    >>> task = tasks.create("flip_flop", length=8)
    >>> batches = train_iterator(task, batch_size=4, examples=6, data_seed=0, shuffle_seed=1)
    >>> first, state = next(batches), batches.get_state()
    >>> second = next(batches)
    >>> batches.set_state(state)
    >>> np.array_equal(next(batches)["inputs"], second["inputs"])
    True
    """
    check_at_least(1, "pipeline", batch_size=batch_size, readers=readers)
    check_at_least(0, "pipeline", 2**63 - 1, data_seed=data_seed, shuffle_seed=shuffle_seed)
    rows = range(batch_size) if rows is None else rows
    batches = grain.MapDataset.range(_ENDLESS)
    stream = task.stream("train", batch_size)
    if stream is not None:
        if examples is not None or data_dir is not None:
            raise ConfigError(
                f"{task.name} is one long text: do not set training.examples or training.data_dir"
            )

        dataset = batches.map(
            lambda i: {name: field[rows] for name, field in stream[i % len(stream)].items()}
        )
    elif data_dir is None and examples is None and task.size("train") is None:
        entropy = [data_seed, shuffle_seed, zlib.crc32(b"train")]

        def drawn(i: int) -> Batch:
            batch = task.sample(np.random.default_rng([*entropy, i]), batch_size)
            if len(rows) == batch_size:
                return batch
            return {name: array[rows] for name, array in batch.items()}

        dataset = batches.map(drawn)
    else:
        source, mixture = _examples(task, "train", examples, data_seed, data_dir)
        if mixture and examples is not None:
            raise ConfigError(
                f"{task.name} samples a mixture by its weights: do not set training.examples"
            )
        stored = task.blocks("train") if isinstance(task, StoredTask) and data_dir is None else None
        shuffled = _shuffled(source, mixture, stored, shuffle_seed)

        def gathered(i: int) -> Batch:
            taken = [shuffled[i * batch_size + row] for row in rows]
            return {name: np.stack([row[name] for row in taken]) for name in taken[0]}

        dataset = batches.map(gathered)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(readers, _AHEAD * readers)))


def evaluation_batches(
    task: Task,
    split: str,
    *,
    examples: int,
    batch_size: int,
    seed: int,
    data_dir: str | None = None,
) -> list[Batch]:
    """Returns the first `examples` of `split` in batches of one shape, filled by weights 0.

    `split` is a fixed split or a split of the task's sweep. If the split has fewer examples, the
    batches contain the entire split. For a stream, `examples` is rounded up to whole batches.
    `data_dir` is as in `train_iterator`, and has no splits of a sweep.

    Raises:
      ConfigError: the split is unknown, a size or seed is out of range, or `data_dir` does not
        contain these examples.

    >>> from cope_jax import tasks
    >>> task = tasks.create("flip_flop", length=8)
    >>> batches = evaluation_batches(task, "sparse", examples=6, batch_size=4, seed=0)
    >>> [batch["weights"].max(axis=1).tolist() for batch in batches]
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    """
    check_at_least(1, "pipeline", batch_size=batch_size)
    check_at_least(0, "pipeline", 2**63 - 1, seed=seed)
    stream = task.stream(split, batch_size)
    if stream is not None:
        return [stream[i] for i in range(min(len(stream), -(-examples // batch_size)))]
    source, _ = _examples(task, split, examples, seed, data_dir)
    rows = [source[i] for i in range(len(source))]
    blank = {key: np.zeros_like(value) for key, value in rows[0].items()}
    rows += [blank] * (-len(rows) % batch_size)
    starts = range(0, len(rows), batch_size)
    chunks = (rows[start : start + batch_size] for start in starts)
    return [{key: np.stack([row[key] for row in chunk]) for key in blank} for chunk in chunks]


def _shuffled(
    whole: grain.MapDataset,
    mixture: Sequence[tuple[float, range]],
    stored: Blocks | None,
    seed: int,
) -> grain.MapDataset:
    """Returns endless examples, in an order that changes with each epoch.

    The parts of a mixture alternate in proportion to their weights.
    """
    # Grain shuffles epoch e by seed + e. Without hashing, seed 1 would see the epochs of seed 0,
    # one epoch early.
    seeds = np.random.SeedSequence(seed).generate_state(max(1, len(mixture))).tolist()
    ranges = [indices for _, indices in mixture] or [range(len(whole))]
    if stored is None:
        chosen = zip((whole.slice(slice(r.start, r.stop)) for r in ranges), seeds, strict=True)
        parts = [examples.shuffle(seed).repeat() for examples, seed in chosen]
    else:
        orders = [
            WindowOrder(
                [
                    block[: len(whole) - block.start]
                    for block in stored.ranges
                    if block.start in indices
                ],
                stored.window,
                seed,
            )
            for indices, seed in zip(ranges, seeds, strict=True)
        ]
        parts = [
            grain.MapDataset.range(_ENDLESS).map(order.__getitem__).map(whole.__getitem__)
            for order in orders
        ]
    return grain.MapDataset.mix(parts, [weight for weight, _ in mixture]) if mixture else parts[0]


class WindowOrder:
    """An endless order of examples stored in blocks, in which neighbours are in few blocks.

    In each epoch, the blocks have a random order. Then each run of `window` examples is shuffled; a
    window may span several blocks. Every example comes once in an epoch. Item i depends only on the
    arguments and i.

    >>> order = WindowOrder([range(0, 3), range(3, 6)], window=3, seed=0)
    >>> [order[i] for i in range(6)], [order[i] for i in range(6, 12)]
    ([2, 0, 1, 4, 5, 3], [2, 0, 1, 3, 4, 5])
    """

    def __init__(self, blocks: Sequence[range], window: int, seed: int):
        self._blocks, self._window, self._seed = blocks, window, seed
        self._size = sum(map(len, blocks))
        # Grain's threads read a few windows at a time, and the last of an epoch together with the
        # first of the next.
        self._epoch = functools.lru_cache(maxsize=2)(self._blocks_of)
        self._places = functools.lru_cache(maxsize=4)(self._shuffled_window)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self._size)
        number, within = divmod(position, self._window)
        order, ends = self._epoch(epoch)
        position = number * self._window + int(self._places(epoch, number)[within])
        block = int(np.searchsorted(ends, position, side="right"))
        chosen = self._blocks[order[block]]
        return chosen[position - int(ends[block])]  # negative: counted from the end of the block

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._blocks))
        return order, np.cumsum([len(self._blocks[block]) for block in order])

    def _shuffled_window(self, epoch: int, number: int) -> np.ndarray:
        size = min(self._window, self._size - number * self._window)
        return np.random.default_rng([self._seed, epoch, number]).permutation(size)


def _examples(
    task: Task, split: str, examples: int | None, seed: int, data_dir: str | None
) -> tuple[grain.MapDataset, Sequence[tuple[float, range]]]:
    """Returns the examples of a split, and the parts of the split if it is a mixture."""
    check_at_least(1, "pipeline", examples=examples)
    if data_dir is not None:
        return _written(task, split, examples, seed, data_dir)
    size = task.size(split)
    if size is not None:
        examples = size if examples is None else min(examples, size)
    assert examples is not None  # only splits of fixed size come without a number
    places = grain.MapDataset.range(examples)
    if isinstance(task, StoredTask):
        source = places.map(
            lambda i: {name: rows[0] for name, rows in task.take(split, np.array([i])).items()}
        )
    else:
        batch = task.dataset(split, examples, seed)
        source = places.map(lambda i: {name: rows[i] for name, rows in batch.items()})
    return source, task.mixture(split)


def _written(
    task: Task, split: str, examples: int | None, seed: int, data_dir: str
) -> tuple[grain.MapDataset, Sequence[tuple[float, range]]]:
    """Like `_examples`, but reads the examples from disk, without the task's files."""
    from cope_jax.data import tfds_builder  # here, because only reading from disk needs TFDS

    source = tfds_builder.read(task, data_dir, split, seed=seed)
    if source.size is not None:
        examples = source.size if examples is None else min(examples, source.size)
    if examples is None:
        raise ConfigError(
            "data_dir holds a fixed number of examples: set `examples` to this number, or omit data_dir"
        )
    if len(source) != examples:
        field = "training.examples" if split == "train" else "evaluation.examples"
        raise ConfigError(
            f"{data_dir} holds {len(source)} examples of {split!r}, not {examples}: set {field}={len(source)}"
        )
    return grain.MapDataset.source(source), source.mixture
