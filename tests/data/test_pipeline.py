import itertools
import json
import logging
import threading
import zlib

import grain
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import document_files
from cope_jax.corpora.export_sources import Files
from cope_jax.data import pipeline, tfds_builder
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError
from tests.data.test_export_again import BYTES, OPTIONS, source

EXAMPLES = 10
SEEDS = {"data_seed": 3, "shuffle_seed": 5}


@pytest.fixture
def task():
    return tasks.create("flip_flop", length=32)


def take(iterator, n):
    return list(itertools.islice(iterator, n))


def rows(batches):
    return [row.tobytes() for batch in batches for row in batch["inputs"]]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
            assert a[key].dtype == b[key].dtype


@pytest.fixture(params=["endless", "memory", "disk"])
def make_iterator(request, task, tmp_path):
    options = {
        "batch_size": 4,
        "examples": None if request.param == "endless" else EXAMPLES,
        **SEEDS,
    }
    if request.param == "disk":
        tfds_builder.write(task, tmp_path, {"train": EXAMPLES}, seed=SEEDS["data_seed"])
        options["data_dir"] = str(tmp_path)
    return lambda **changes: pipeline.train_iterator(task, **(options | changes))


def test_batches_are_of_the_promised_form(make_iterator, task):
    iterator = make_iterator()
    assert isinstance(iterator, grain.DatasetIterator)
    for batch in take(iterator, 5):
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
            "inputs": ((4, 31), np.int32),
            "targets": ((4, 31), np.int32),
            "weights": ((4, 31), np.float32),
        }


@pytest.mark.parametrize(
    "seen",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)),
        pytest.param(11, marks=pytest.mark.newest),
    ],
)
def test_goes_on_exactly_from_a_saved_state(make_iterator, seen):
    straight = take(make_iterator(), 16)
    first = make_iterator()
    take(first, seen)
    state = json.loads(json.dumps(first.get_state()))
    second = make_iterator()
    take(second, 2)
    second.set_state(state)
    assert_same(take(second, 16 - seen), straight[seen:])
    first.set_state(state)
    assert_same(take(first, 16 - seen), straight[seen:])


def test_any_number_of_readers_gives_the_same_batches_and_goes_on_from_the_same_state(
    make_iterator,
):
    straight = take(make_iterator(), 20)
    four, single = make_iterator(readers=4), make_iterator()
    assert_same(take(four, 11), straight[:11])
    take(single, 11)
    assert four.get_state() == single.get_state()
    for readers in (1, 3):
        other = make_iterator(readers=readers)
        other.set_state(json.loads(json.dumps(four.get_state())))
        assert_same(take(other, 9), straight[11:])


def test_readers_read_side_by_side(task, monkeypatch):
    # Opens only when three batches are being drawn at once.
    together = threading.Barrier(3, timeout=30)
    sample, calls = task.sample, itertools.count()

    def waiting(*args):
        if next(calls) < 3:
            together.wait()
        return sample(*args)

    monkeypatch.setattr(task, "sample", waiting)
    iterator = pipeline.train_iterator(task, batch_size=4, examples=None, readers=3, **SEEDS)
    assert len(take(iterator, 3)) == 3


def test_each_seed_changes_the_batches(make_iterator):
    first = rows(take(make_iterator(), 3))
    assert rows(take(make_iterator(), 3)) == first
    assert rows(take(make_iterator(shuffle_seed=6), 3)) != first


def test_endless_batches_are_a_function_of_seeds_and_index(task):
    iterator = pipeline.train_iterator(task, batch_size=4, examples=None, **SEEDS)
    for i, batch in enumerate(take(iterator, 3)):
        rng = np.random.default_rng([3, 5, zlib.crc32(b"train"), i])
        assert_same([batch], [task.sample(rng, 4)])
    other = pipeline.train_iterator(task, batch_size=4, examples=None, data_seed=4, shuffle_seed=5)
    assert not np.array_equal(
        next(other)["inputs"],
        task.sample(np.random.default_rng([3, 5, zlib.crc32(b"train"), 0]), 4),
    )


def epochs(task, n, **options):
    """The order of the examples in each of n epochs, as numbers in the fixed split."""
    iterator = pipeline.train_iterator(task, batch_size=4, examples=EXAMPLES, **options)
    number = {
        row: i
        for i, row in enumerate(rows([task.dataset("train", EXAMPLES, options["data_seed"])]))
    }
    order = [number[row] for row in rows(take(iterator, -(-n * EXAMPLES // 4)))]
    return [order[e * EXAMPLES : (e + 1) * EXAMPLES] for e in range(n)]


def test_every_epoch_is_the_fixed_split_in_a_new_order(task):
    orders = epochs(task, 4, **SEEDS)
    assert all(sorted(order) == list(range(EXAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_shuffle_seeds_order_the_same_examples_independently(task):
    orders = [
        order for seed in range(3) for order in epochs(task, 3, data_seed=0, shuffle_seed=seed)
    ]
    assert len({tuple(order) for order in orders}) == 9


@pytest.mark.newest
def test_disk_gives_the_batches_of_memory(task, tmp_path):
    tfds_builder.write(task, tmp_path, {"train": EXAMPLES, "sparse": 5}, seed=3)
    disk, memory = (
        pipeline.train_iterator(task, batch_size=4, examples=EXAMPLES, data_dir=data_dir, **SEEDS)
        for data_dir in (str(tmp_path), None)
    )
    assert_same(take(disk, 8), take(memory, 8))
    options = {"examples": 5, "batch_size": 4, "seed": 3}
    assert_same(
        pipeline.evaluation_batches(task, "sparse", data_dir=str(tmp_path), **options),
        pipeline.evaluation_batches(task, "sparse", **options),
    )


@pytest.mark.parametrize(("examples", "batch_size", "count"), [(8, 4, 2), (9, 4, 3), (3, 8, 1)])
@pytest.mark.parametrize("split", ["in_distribution", "ignore=0.5"])
def test_evaluation_is_the_fixed_split_filled_up_with_weight_0(
    task, split, examples, batch_size, count
):
    batches = pipeline.evaluation_batches(
        task, split, examples=examples, batch_size=batch_size, seed=7
    )
    assert len(batches) == count
    assert {value.shape for batch in batches for value in batch.values()} == {(batch_size, 31)}
    whole = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    assert_same(
        [{key: value[:examples] for key, value in whole.items()}],
        [task.dataset(split, examples, seed=7)],
    )
    assert not whole["weights"][examples:].any()


def test_nothing_is_logged(make_iterator, caplog):
    with caplog.at_level(logging.WARNING):
        take(make_iterator(), 3)
    assert not caplog.records


SHARES = {
    "halves": [[0, 1], [2, 3]],
    "every other": [[0, 2], [1, 3]],
    "one": [[3], [0, 1, 2]],
    "twice": [[0, 1, 2, 3]],
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_the_rows_of_all_processes_are_the_batch_and_their_places_are_the_same(
    make_iterator, shares
):
    whole, parts = make_iterator(), [make_iterator(rows=np.array(rows)) for rows in shares]
    for batch in take(whole, 6):  # more than two epochs of the fixed split
        joined = {name: np.zeros_like(array) for name, array in batch.items()}
        for rows, iterator in zip(shares, parts, strict=True):
            for name, array in next(iterator).items():
                assert array.shape == (len(rows), 31)
                joined[name][rows] = array
        assert_same([joined], [batch])
    assert [iterator.get_state() for iterator in parts] == [whole.get_state()] * len(parts)


def test_other_processes_go_on_with_the_same_order(make_iterator):
    """Two processes stop; one, and then four, go on from their place."""
    straight = take(make_iterator(), 12)
    halves = [make_iterator(rows=rows) for rows in ([0, 1], [2, 3])]
    for half in halves:
        take(half, 5)
    state = json.loads(json.dumps(halves[1].get_state()))
    single = make_iterator()
    single.set_state(state)
    assert_same(take(single, 4), straight[5:9])
    state = json.loads(json.dumps(single.get_state()))
    for row in range(4):
        alone = make_iterator(rows=[row])
        alone.set_state(state)
        expected = [{name: array[[row]] for name, array in batch.items()} for batch in straight[9:]]
        assert_same(take(alone, 3), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"data_seed": -1}, "data_seed must be at least 0, got -1"),
        ({"shuffle_seed": -1}, "shuffle_seed must be at least 0, got -1"),
        ({"readers": 0}, "readers must be at least 1, got 0"),
        ({"data_dir": "x"}, "^x holds no data of flip_flop: write it with"),
    ],
)
def test_mistakes_in_training_are_one_clear_line(task, changes, message):
    with pytest.raises(ConfigError, match=message):
        pipeline.train_iterator(task, **({"batch_size": 4, "examples": 8, **SEEDS} | changes))


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"examples": 0}, {"seed": -1}, {"split": "unknown"}]
)
def test_mistakes_in_evaluation_are_one_clear_line(task, changes):
    options = {"split": "sparse", "examples": 4, "batch_size": 4, "seed": 0} | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        pipeline.evaluation_batches(task, **options)


def test_disk_must_hold_as_many_examples_as_asked(task, tmp_path):
    tfds_builder.write(task, tmp_path, {"train": EXAMPLES}, seed=3)
    with pytest.raises(
        ConfigError, match=r"holds 10 examples of 'train', not 9: set training\.examples=10"
    ):
        pipeline.train_iterator(task, batch_size=4, examples=9, data_dir=str(tmp_path), **SEEDS)
    with pytest.raises(
        ConfigError, match=r"^data_dir holds a fixed number of examples: set `examples`"
    ):
        pipeline.train_iterator(task, batch_size=4, examples=None, data_dir=str(tmp_path), **SEEDS)


def mixture():
    return tasks.create(
        "text", corpus="3*wikitext-2+files", vocab_size=300, length=16, packing="documents"
    )


def test_a_mixture_gives_each_part_its_share_and_every_example_of_it_in_turn():
    task = mixture()
    iterator = pipeline.train_iterator(task, batch_size=4, examples=None, **SEEDS)
    number = {row: i for i, row in enumerate(rows([task.dataset("train", task.size("train"))]))}
    drawn = np.array([number[row] for row in rows(take(iterator, 100))])
    (_, indices), (_, others) = task.mixture("train")
    assert np.mean(drawn < indices.stop) == pytest.approx(0.75, abs=0.01)
    for corpus in (indices, others):
        drawn_here = drawn[(drawn >= corpus.start) & (drawn < corpus.stop)]
        epochs = [
            sorted(drawn_here[start : start + len(corpus)])
            for start in range(0, len(drawn_here) - len(corpus) + 1, len(corpus))
        ]
        assert epochs and all(epoch == list(corpus) for epoch in epochs)


def test_a_mixture_goes_on_exactly_and_is_shared_by_processes():
    task = mixture()
    whole = pipeline.train_iterator(task, batch_size=4, examples=None, **SEEDS)
    halves = [
        pipeline.train_iterator(task, batch_size=4, examples=None, rows=rows, **SEEDS)
        for rows in ([0, 2], [1, 3])
    ]
    straight = take(whole, 9)
    for batch in straight[:6]:
        parts = [next(half) for half in halves]
        for name, field in batch.items():
            np.testing.assert_array_equal(
                np.stack([rows[name] for rows in parts], axis=1).reshape(field.shape), field
            )
    state = json.loads(json.dumps(halves[0].get_state()))
    assert state == {"next_index": 6}
    whole.set_state(state)
    assert_same(take(whole, 3), straight[6:])
    with pytest.raises(
        ConfigError, match=r"^text samples a mixture by its weights: do not set training.examples$"
    ):
        pipeline.train_iterator(task, batch_size=4, examples=8, **SEEDS)


def test_the_first_examples_of_several_folders_are_of_each_by_its_size(tmp_path):
    folders, options = [], {"length": 8, "tokenizer": "bytes"}
    for name, count in (("few", 100), ("many", 300)):
        lines = [json.dumps({"text": f"{name} {n} " + name * (n % 7)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        documents = Files(tuple(document_files.find([f"{tmp_path}/{name}.jsonl"])), held_out=0.2)
        folders.append(str(tmp_path / name))
        export(documents, folders[-1], Vocabulary("bytes"), Options(length=8))
    task = tasks.create("sharded_text", folders=tuple(folders), **options)
    single = [tasks.create("sharded_text", folders=(folder,), **options) for folder in folders]
    for split in ("train", "validation", "test"):
        whole = task.dataset(split, task.size(split))["targets"]
        few, many = (t.dataset(split, t.size(split))["targets"] for t in single)
        if split == "train":  # which draws from folders by their weights
            np.testing.assert_array_equal(whole, np.concatenate([few, many]))
            continue
        known = {row.tobytes() for row in few}
        of_few = np.array([row.tobytes() in known for row in whole])
        np.testing.assert_array_equal(whole[of_few], few)
        np.testing.assert_array_equal(whole[~of_few], many)
        counts = np.cumsum(of_few) - np.arange(1, len(whole) + 1) * len(few) / len(whole)
        assert np.abs(counts).max() <= 1


def test_a_fixed_number_of_examples_is_an_epoch_of_them(tmp_path):
    export(source(tmp_path / "in"), tmp_path / "out", BYTES, OPTIONS)
    task = tasks.create("sharded_text", folders=(str(tmp_path / "out"),), length=8, window=7)
    size = task.size("train")
    assert size > 60

    def epoch(examples, number):
        batches = pipeline.train_iterator(
            task, data_seed=0, shuffle_seed=0, examples=examples, batch_size=1
        )
        examples_read = [next(batches)["inputs"].tobytes() for _ in range(number * examples)]
        return [
            examples_read[start : start + examples]
            for start in range(0, len(examples_read), examples)
        ]

    wanted = sorted(row.tobytes() for row in task.take("train", np.arange(50))["inputs"])
    for examples_read in epoch(50, 2):
        assert sorted(examples_read) == wanted
