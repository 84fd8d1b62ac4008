import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.data import pipeline
from cope_jax.ops.losses import token_measures
from cope_jax.training import evaluator
from cope_jax.training.evaluator import Evaluator
from tests.training import tiny

# Splits of three lengths: 4 + 4, 4 + 2 and 4 + 8 tokens.
TASK = tasks.create("selective_copy", num_symbols=3, num_tokens=2, num_blanks=4)
SPLITS = {"in_distribution": 5, "dense": 4, "sparse": 7, "blanks=3": 3}
MEASURED = ["loss", "token_error", "sequence_error"]


def bigram(params, inputs_BL, positions_BL):
    """Logits that depend on the token alone."""
    del positions_BL
    return params[inputs_BL]


@pytest.fixture
def table(rng):
    return rng.normal(size=(TASK.vocab_size, TASK.vocab_size)).astype(np.float32)


def measures_of(logits):
    """The measures of a model with these logits, which carries nothing."""

    def metrics(params, carry, batch):
        logits_BLV = logits(params, batch["inputs"], batch["positions"])
        return token_measures(logits_BLV, batch["targets"], batch["weights"]), carry

    return metrics


def create(logits=bigram, splits=SPLITS, batch_size=4, data_dir=None, **program):
    options = {"batch_size": batch_size, "data_seed": 11, "data_dir": data_dir}
    return Evaluator(tiny.measuring(measures_of(logits), **program), TASK, splits, **options)


def count(table, split, examples):
    """Loss and errors of the bigram table, example by example and token by token."""
    batch, losses, wrong_tokens, wrong_sequences = TASK.dataset(split, examples, 11), [], 0, 0
    for inputs, targets, weights in zip(
        *(batch[name] for name in ("inputs", "targets", "weights")), strict=True
    ):
        wrong = 0
        for token, target, weight in zip(inputs, targets, weights, strict=True):
            if weight:
                logits = table[token].astype(np.float64)
                losses.append(np.log(np.exp(logits).sum()) - logits[target])
                wrong += int(logits.argmax() != target)
        wrong_tokens += wrong
        wrong_sequences += wrong > 0
    errors = (np.mean(losses), wrong_tokens / len(losses), wrong_sequences / examples)
    return dict(zip(MEASURED, errors, strict=True))


def assert_close(ours, theirs, rtol=1e-6):
    for name in MEASURED:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, err_msg=name)


def test_errors_are_those_counted_one_by_one(table):
    measured = create()(table)
    assert list(measured) == list(SPLITS)
    for split, examples in SPLITS.items():
        (ours,) = measured[split]
        assert_close(ours, count(table, split, examples))
    assert 0 < measured["sparse"][0]["token_error"] < measured["sparse"][0]["sequence_error"]


def test_measures_are_compiled_with_the_options_of_the_mesh(table, monkeypatch):
    monkeypatch.setattr(evaluator, "compiler_options", lambda _: {"no_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_option"):
        create()(table)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_the_size_of_a_batch_changes_nothing(batch_size, table):
    for split, (ours,) in create(batch_size=batch_size)(table).items():
        assert_close(ours, count(table, split, SPLITS[split]))


def test_a_perfect_model_has_no_error():
    def oracle(params, inputs_BL, positions_BL):
        return 200 * jax.nn.one_hot(params, TASK.vocab_size)

    targets_BL = TASK.dataset("dense", 4, 11)["targets"]
    (measured,) = create(oracle, splits={"dense": 4})(targets_BL)["dense"]
    assert measured == dict.fromkeys(MEASURED, 0.0)


def test_a_bound_on_the_examples_is_rounded_up_to_batches(table):
    evaluator = create(batch_size=2)
    for bound, examples in ((1, 2), (2, 2), (3, 4), (7, 7), (100, 7)):
        (ours,) = evaluator(table, ["sparse"], bound)["sparse"]
        assert_close(ours, count(table, "sparse", examples))


def test_all_splits_and_bounds_share_one_program(table):
    traced = []

    def counting(params, inputs_BL, positions_BL):
        traced.append(inputs_BL.shape)
        return bigram(params, inputs_BL, positions_BL)

    evaluator = create(counting)
    for arguments in [(), (["dense"],), (["sparse", "in_distribution"], 4)]:
        evaluator(table, *arguments)
    assert traced == [(4, 2 * 2 + 8)]


def test_padding_to_the_longest_split_changes_nothing_for_a_causal_model():
    program = tiny.program()
    params = program.init([0]).params
    splits = {"dense": 6, "sparse": 6}
    options = {"batch_size": 4, "data_seed": 0}

    def errors(splits):
        # Symbols and lengths of the tiny model's vocabulary and table.
        task = tasks.create("selective_copy", num_symbols=3, num_tokens=2, num_blanks=3)
        assert (task.vocab_size, task.length("dense"), task.length("sparse")) == (5, 5, 10)
        return Evaluator(program, task, splits, **options)(params)["dense"][0]

    # Longer rows are summed in another order.
    assert_close(errors(splits), errors({"dense": 6}), rtol=1e-5)


def test_runs_side_by_side_are_measured_each_for_itself(table):
    tables = np.stack([table, -table, 0 * table])
    for split, runs in create(width=3)(tables).items():
        for ours, table_of_run in zip(runs, tables, strict=True):
            assert_close(ours, count(table_of_run, split, SPLITS[split]))


def test_positions_are_sampled_for_each_batch_at_its_own_length_and_repeat_the_last_in_the_padding():
    keys, seen = [], {}

    def sampler(key, batch, length):
        keys.append((tuple(jax.random.key_data(key).tolist()), batch, length))
        return np.arange(length, dtype=np.int32)[None] + 10 * len(keys)

    def spying(params, inputs_BL, positions_BL):
        jax.debug.callback(
            lambda positions: seen.setdefault(len(seen), positions.tolist()), positions_BL
        )
        return params[inputs_BL]

    evaluator = create(spying, splits={"dense": 5, "sparse": 1}, sampler=sampler)
    assert [sizes for _, *sizes in keys] == [[4, 6], [4, 6], [4, 12]]
    assert keys[0][0] != keys[1][0]
    evaluator(np.zeros((TASK.vocab_size, TASK.vocab_size), np.float32))
    jax.effects_barrier()
    assert seen[0] == [[10, 11, 12, 13, 14, 15, *[15] * 6]]
    assert seen[2] == [list(range(30, 42))]


def test_fixed_splits_are_read_from_disk_and_sweeps_are_drawn(table, monkeypatch):
    asked = {}
    draw = pipeline.evaluation_batches

    def reading(task, split, *, data_dir, **options):
        asked[split] = data_dir
        return draw(task, split, **options)

    monkeypatch.setattr(pipeline, "evaluation_batches", reading)
    create(data_dir="somewhere")
    assert asked == {
        "in_distribution": "somewhere",
        "dense": "somewhere",
        "sparse": "somewhere",
        "blanks=3": None,
    }


@pytest.mark.parametrize(("multiple", "length"), [(1, 12), (4, 12), (5, 15), (8, 16)])
def test_the_one_length_is_a_multiple_of_what_is_asked_and_nothing_else_changes(
    multiple, length, table
):
    traced = []

    def counting(params, inputs_BL, positions_BL):
        traced.append((inputs_BL.shape, positions_BL.shape))
        return bigram(params, inputs_BL, positions_BL)

    measured = create(counting, sequence=multiple)(table)
    assert traced == [((4, length), (1, length))]
    for split, examples in SPLITS.items():
        assert_close(measured[split][0], count(table, split, examples))


def test_batches_are_placed_before_they_are_measured(table):
    placed = []

    def put(batch):
        placed.append({name: array.shape for name, array in batch.items()})
        return jax.tree.map(lambda array: jax.device_put(array, jax.devices()[0]), batch)

    (ours,) = create(put=put)(table, ["in_distribution"])["in_distribution"]
    assert_close(ours, count(table, "in_distribution", 5))
    shapes = {"inputs": (4, 12), "targets": (4, 12), "weights": (4, 12), "positions": (1, 12)}
    assert placed == [shapes] * 2
