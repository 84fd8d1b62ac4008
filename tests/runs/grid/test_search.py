"""The search of a value, such as the learning rate, by trials that train before the cells."""

import dataclasses
import json

import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid import search
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid, State
from tests.runs.grid.test_cells import RECORD, fail, finish

RATES = {"optimizer.learning_rate": (1e-3, 3e-3, 1e-2)}


def cell(name="rope", seed=0, search=RATES, **training):
    return Cell(
        cj.config("quick", encoding=name, training=training), (seed,), "quick", search=search
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), "needs a tuple of values"),
        (0.1, "needs a tuple"),
        ("ab", "needs a tuple"),
        ((1, 2, 1.0), "a value twice"),
    ],
)
def test_values_to_search_are_a_tuple(values, message):
    with pytest.raises(
        ConfigError,
        match=rf"optimizer\.learning_rate {'has' if 'twice' in message else ''} ?{message}",
    ):
        search.trials([cell(search={"optimizer.learning_rate": values})])


def test_seeds_with_data_of_their_own_share_their_trials(tmp_path):
    """The trials of a setting and label are the same for every seed, and have data that no seed
    has.
    """
    cells = [cell(seed=seed, data_seed=seed) for seed in range(3)]
    trials = search.trials(cells)
    assert [trial.config.optimizer.learning_rate for trial in trials] == [1e-3, 3e-3, 1e-2]
    assert {trial.config.training.data_seed for trial in trials} == {search.SEED}
    assert (
        trials[0].folder(tmp_path)
        == tmp_path / "quick_search_learning_rate=0.001/cells/rope/seed_1000000"
    )
    assert search.trials([cell(search={})]) == []


def test_a_failed_trial_blocks_its_cells_and_a_diverged_one_does_not(tmp_path):
    cells = [cell(), cell("cope", search={})]
    trials = Grid(tmp_path, search.trials(cells))
    first, second, third = trials.cells
    for trial in (first, third):
        finish(trial, tmp_path)
    assert search.left(trials) == [second] and search.left(trials, only_failed=True) == []
    assert search.blocked(cells, trials.state(), tmp_path) == State([], {}, [cells[0]])
    fail(second, tmp_path)
    assert search.left(trials, only_failed=True) == [second]
    failed = State([], {cells[0]: f"trial {second.name}: error: no"}, [])
    assert search.blocked(cells, trials.state(), tmp_path) == failed
    both = State([], {second: "error: no"}, [first])
    assert search.blocked(cells, both, tmp_path) == failed
    fail(second, tmp_path, status=3)  # its loss is not finite
    assert search.left(trials) == []
    assert search.blocked(cells, trials.state(), tmp_path) == State([], {}, [])
    assert search.blocked(cells, State([], {}, [first]), tmp_path).left == [cells[0]]


def test_the_trial_with_the_lowest_loss_decides(tmp_path):
    cells = [cell(name, seed, steps=200) for name in ("rope", "cope") for seed in range(2)]
    assert search.choose(cells[0], tmp_path) == (cells[0], {})  # no trial has ended
    trials = search.trials(cells)
    assert len(trials) == 6
    # A loss that is not finite is null.
    for trial, loss in zip(trials[:3], (0.5, 0.2, None), strict=True):
        folder = trial.folder(tmp_path)
        folder.mkdir(parents=True)
        rows = [
            ("token_error", "split", 0),
            ("loss", "sweep", 0),
            ("loss", "split", loss),
            ("loss", "split", 0),
        ]
        fields = ({"metric": metric, "kind": kind, "value": value} for metric, kind, value in rows)
        records = [{**RECORD, **given} for given in fields]
        (folder / "result.json").write_text(json.dumps({"records": records}))
    for ours in cells[:2]:
        chosen, values = search.choose(ours, tmp_path)
        assert values == {"optimizer.learning_rate": 3e-3}
        assert chosen.folder(tmp_path) == ours.folder(tmp_path) and not chosen.search
        optimizer = dataclasses.replace(ours.config.optimizer, learning_rate=3e-3)
        assert chosen.config == dataclasses.replace(ours.config, optimizer=optimizer)
    assert search.choose(cells[2], tmp_path) == (cells[2], {})
    assert search.choices(cells[:2], tmp_path) == ["quick, rope: learning_rate=0.003"]
    (trials[1].folder(tmp_path) / "result.json").unlink()
    (trials[0].folder(tmp_path) / "result.json").write_text(
        json.dumps({"records": [{**records[2], "value": None}]})
    )
    assert search.choices(cells[:2], tmp_path) == ["quick, rope: all trials diverged"]
    (trials[0].folder(tmp_path) / "result.json").write_text('{"records": [{"value": 1}]}')
    with pytest.raises(
        ConfigError, match=r"result.json is damaged \(a record lacks seed\): delete"
    ):
        search.choose(cells[0], tmp_path)


def test_a_finished_cell_has_the_values_of_its_record(tmp_path):
    ours = cell("rope", 0, steps=200)
    optimizer = dataclasses.replace(ours.config.optimizer, learning_rate=3e-3)
    trained = dataclasses.replace(ours.config, optimizer=optimizer)
    workdirs.Workdir(ours.folder(tmp_path)).open(trained, ours.seeds)
    known = search.recorded(ours, tmp_path)
    assert (known.config, known.search) == (trained, {})
    plain = cell("rope", 0, steps=200, search={})
    assert search.recorded(plain, tmp_path) == plain


def test_the_budget_is_said_in_words():
    assert search.budget([cell()]) == "learning_rate chosen for each encoding from 3 trials"
    assert search.budget([cell(search={})]) == ""
    other = dataclasses.replace(cell(search={}), setting="other")
    assert (
        search.budget([cell(), other])
        == "learning_rate of quick chosen for each encoding from 3 trials"
    )
