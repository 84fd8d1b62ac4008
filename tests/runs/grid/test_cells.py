"""Cells and the plan of a grid: names, files that yield cells, mistakes, and what is known from the
disk.
"""

import dataclasses
import json
import os
import platform
import re
import sys
import tarfile
import zlib
from pathlib import Path

import pytest

import cope_jax as cj
from cope_jax import encodings
from cope_jax.configs.abilities import SETTINGS
from cope_jax.encodings import ENCODINGS
from cope_jax.errors import ConfigError
from cope_jax.grids import abilities_v2, language
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid import grid_file, search
from cope_jax.runs.grid.cell import Cell, entries, plan
from cope_jax.runs.grid.cell_process import FAILED
from cope_jax.runs.grid.grid import Grid
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from tests.corpora.data import real
from tests.encodings.test_registry import OWN

ROOT = Path(__file__).parents[3]
QUICK = cj.config("quick", encoding="rope")
GRID = """
import cope_jax as cj
from cope_jax.runs.grid.cell import Cell

def quick(name="rope", **changes):
    return cj.config("quick", encoding=name, **changes)

def get_cells():
    {body}
"""


def cell(name="rope", seed=0, setting="quick", **changes):
    return Cell(cj.config("quick", encoding=name, **changes), (seed,), setting)


def write_grid(folder, body):
    path = folder / "grid.py"
    path.write_text(GRID.format(body=body))
    return str(path)


RECORD = {"encoding": "rope", "seed": 0, "split": "dense", "metric": "loss", "value": 0.5}
RECORD |= {"step": 9, "parameters": 9, "wall_seconds": 1.0}


def finish(cell, workdir, seconds=1.0):
    """Writes what a finished cell leaves behind."""
    folder = cell.folder(workdir)
    workdirs.Workdir(folder).open(cell.config, cell.seeds)
    records = [{**RECORD, "kind": "split", "wall_seconds": seconds}]
    (folder / "result.json").write_text(json.dumps({"records": records, "environment": {}}))


def fail(cell, workdir, line="error: no", status=2):
    cell.folder(workdir).mkdir(parents=True, exist_ok=True)
    (cell.folder(workdir) / FAILED).write_text(json.dumps({"line": line, "status": status}))


def test_a_cell_has_a_name_and_a_folder():
    several = Cell(cj.config("quick", encoding="cope(gate=value)"), (3, 4), "two steps")
    assert several.name == "two steps, cope(gate=value), seeds 3–4"
    assert several.folder(Path("runs")) == Path("runs/two_steps/cells/cope_gate=value/seeds_3-4")
    single = Cell(QUICK, (3,), label="mine")
    assert (single.name, single.folder(Path("runs"))) == (
        "mine, seed 3",
        Path("runs/cells/mine/seed_3"),
    )
    assert (several.fields, single.fields) == ({}, {"system": "mine"})


def test_a_cell_takes_the_file_of_its_encoding_along(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    monkeypatch.setattr(ENCODINGS, "_entries", dict(ENCODINGS._entries))
    encodings.load(file)
    text = cell("mine+rope").to_json()
    del ENCODINGS._entries["mine"], sys.modules[str(file)]  # another process
    assert Cell.from_json(text).config.encoding == "mine+rope"
    assert "mine" in ENCODINGS
    file.write_text(f"{OWN}# changed")
    with pytest.raises(ConfigError, match=r"mine\.py has changed since the command started"):
        Cell.from_json(text)


def test_an_entry_has_each_seed_of_a_setting_once_in_the_order_of_the_grid():
    rows = [("rope", 0), ("cope", 0), ("rope", 1), ("cope", 1)]
    grid = [cell(name, seed, setting) for name, seed in rows for setting in ("near", "far")]
    grid += [Cell(QUICK, (1, 2), "near", label="two seeds"), Cell(QUICK, (2,), "near", label="b")]
    assert [entry.name for entry in entries(grid, ["fox"])] == [
        *(f"{setting}, fox, seed {seed}" for seed in (0, 1) for setting in ("near", "far")),
        "near, fox, seed 2",
    ]


def test_a_cell_is_the_same_after_json():
    """Also one with a field that is None and a task with a tuple, which flags could not say."""
    unclipped = dataclasses.replace(
        QUICK, optimizer=dataclasses.replace(QUICK.optimizer, clip_norm=None)
    )
    text = cj.ExperimentConfig.from_mapping(
        {"task": {"name": "text", "options": {"sweep": (16, 32), "length": 16}}}
    )
    for config in (
        unclipped,
        text,
        cj.config("tagger"),
        cj.config("abilities:recall", encoding="cope(gate=value)"),
    ):
        sent = Cell(config, (1, 2), "a", "b", {"optimizer.learning_rate": (1e-3, 3e-3)})
        received = Cell.from_json(sent.to_json())
        assert received.config.recipe() == config.recipe()
        assert received.to_json() == sent.to_json()
        assert (received.seeds, received.name) == ((1, 2), "a, b, seeds 1–2")


def test_the_plan_keeps_what_is_there(tmp_path):
    def planned(seeds, width):
        return [
            (cell.label, cell.seeds)
            for cell in plan({"cope": QUICK, "rope": QUICK}, seeds, width, tmp_path)
        ]

    assert planned(3, 1) == [(name, (seed,)) for name in ("cope", "rope") for seed in range(3)]
    (tmp_path / "cells/rope/seeds_1-2").mkdir(parents=True)
    (tmp_path / "cells/rope/seeds_5-9").mkdir()
    assert planned(5, 2) == [
        *(("cope", seeds) for seeds in ((0, 1), (2, 3), (4,))),
        *(("rope", seeds) for seeds in ((0,), (1, 2), (3, 4))),
    ]


def test_the_plan_does_not_list_the_seeds_of_any_name(tmp_path):
    """Else a folder could take all memory."""
    for name in ("seeds_0-99999999999999", f"seeds_0-{'9' * 200}", "seeds_0-1"):
        (tmp_path / "cells" / "rope" / name).mkdir(parents=True)
    assert [cell.seeds for cell in plan({"rope": QUICK}, 3, 1, tmp_path)] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("folders", "groups"),
    [
        (("seeds_0-1", "seeds_0-2"), [(0, 1, 2), (3, 4, 5)]),
        (("seeds_0-1", "seeds_1-3", "seed_2"), [(0,), (1, 2, 3), (4, 5)]),
        (("seed_1", "seeds_1-1", "seeds_3-5"), [(0,), (1,), (2,), (3, 4, 5)]),
    ],
)
def test_the_plan_has_each_seed_once(folders, groups, tmp_path):
    for name in folders:
        (tmp_path / "cells" / "rope" / name).mkdir(parents=True)
    assert [cell.seeds for cell in plan({"rope": QUICK}, 6, 3, tmp_path)] == groups


@pytest.mark.parametrize("read", [grid_file.read, config_files.named])
def test_a_pipe_is_no_grid_or_config(read, tmp_path):
    os.mkfifo(path := tmp_path / "pipe.py")
    with pytest.raises(ConfigError, match="is a pipe"):
        read(str(path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = ", "SyntaxError"),
        ("return []", "has no cells"),
        ("pass", "must yield or return them, not return None"),
        ("yield 3", "must yield cells of cope_jax.runs.grid.cell, not 3"),
        ("yield Cell('quick')", "a cell needs a config, not 'quick': pass cj.config(name)"),
        ("yield Cell(cj.config('quikc'))", "unknown config 'quikc'"),
        ("yield Cell(quick('ropes'))", "unknown encoding 'ropes': did you mean 'rope'"),
        ("yield Cell(quick(training={'stepz': 1}))", "unknown option of config.training"),
        ("yield Cell(quick(), (-1,))", "the seeds of a cell must be whole numbers of at least 0"),
        (
            "yield Cell(quick(), (0, 2**31))",
            "below 2³¹ and distinct, such as (0, 1), not (0, 2147483648)",
        ),
        ("yield Cell(quick(), (3, 0, 3))", "below 2³¹ and distinct, such as (0, 1), not (3, 0, 3)"),
        ("yield Cell(quick(), 1)", "the seeds of a cell must be whole numbers of at least 0"),
        (
            "yield Cell(quick(), setting='..')",
            "the setting of a cell needs letters or digits, not '..'",
        ),
        ("1 / 0; yield", "(line 9: ZeroDivisionError: division by zero)"),
        (
            "yield Cell(quick()); yield Cell(quick())",
            "two cells have the same setting, label and seeds (rope, seed 0)",
        ),
        (
            "yield Cell(quick(), (0,), 'a'); yield Cell(cj.config('flip_flop:small'), (1,), 'a')",
            "the cells of 'a' have different tasks",
        ),
        (
            "yield Cell(quick()); yield Cell(quick(training={'steps': 900}), (1,))",
            "the cells of '' with rope differ in more than the seed, training.steps (600, not 900)",
        ),
        ("yield Cell(quick(task={'options': {'num_blank': 3}}))", "did you mean 'num_blanks'"),
        (
            "yield Cell(quick(task={'options': {'num_blanks': -3}}), setting='b')",
            "cell b, rope, seed 0: ",
        ),
        ("yield Cell(quick(model={'num_layers': 0}))", "num_layers must be at least 1"),
        ("yield Cell(quick(training={'steps': 20}))", "must be less than training.steps=20"),
        ("yield Cell(quick(training={'positions': 'offset'}))", "set training.max_position"),
        ("yield Cell(cj.config('elmo', encoding='rope'))", "elmo has no attention"),
    ],
)
def test_a_wrong_grid_is_one_line(body, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Grid(tmp_path, grid_file.read(write_grid(tmp_path, body))).check()
    assert "\n" not in str(error.value)


def test_a_file_without_cells_is_one_line(tmp_path):
    for text, message in ((None, "No such file"), ("x = 1\n", "it has none")):
        path = tmp_path / "other.py"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=rf"--grid needs a Python file .* \({message}"):
            grid_file.read(str(path))


@pytest.mark.parametrize(
    "name", [pytest.param("abilities", marks=pytest.mark.slow), "abilities_v2"]
)
def test_the_grids_of_the_project_are_sound(name, tmp_path):
    cells = grid_file.read(grid_file.find(name))
    Grid(tmp_path, cells).check()
    assert len(cells) > 100


FROZEN = Path(__file__).with_name("abilities_v2.json")


def test_version_2_of_abilities_is_frozen():
    """Else records of different times would not be comparable: make a version 3 instead.

    What is frozen is written out, so that options which come later are free to have defaults.
    """
    frozen = json.loads(FROZEN.read_text())
    cells = list(abilities_v2.get_cells())
    encodings_of_cells = list(dict.fromkeys(cell.label for cell in cells))
    assert encodings_of_cells[: len(frozen["encodings"])] == list(frozen["encodings"])
    assert search.SEED == 1_000_000
    for number, name in enumerate(frozen["encodings"]):
        more = [("ignore_v2", seed) for seed in range(5, 25)] if number < 5 else []
        expected = {(setting, seed) for setting in frozen["settings"] for seed in range(5)}
        expected.update(more)
        trained = [cell for cell in cells if cell.label == name]
        assert len(trained) == len(expected)
        assert {(cell.setting, *cell.seeds) for cell in trained} == expected
        for cell in trained:
            assert cell.search == {"optimizer.learning_rate": (1e-3, 2e-3, 4e-3)}
            assert cell.config.training.data_seed == cell.seeds[0]
        first = [cell for cell in trained if cell.seeds == (0,)]  # others differ in the seed alone
        for cell in first:
            known = frozen["settings"][cell.setting] | {
                "encoding": name,
                "encodings": {name: frozen["encodings"][name]},
            }
            assert cell.config.recipe() == ExperimentConfig.from_mapping(known).recipe()
    for ability, known in abilities_v2.DATA.items():
        task, crc = cj.config(f"abilities:{ability}_v2").task.create(), 0
        for split in task.splits:
            for value in task.dataset(split, 64, seed=0).values():
                crc = zlib.crc32(value.astype(value.dtype.newbyteorder("<")).tobytes(), crc)
        assert crc == known, ability
    assert [f"{ability}_v2" for ability in abilities_v2.DATA] == list(frozen["settings"])


def test_language_is_frozen():
    """Else records of different times would not be comparable: make another grid instead."""
    cells = list(language.get_cells())
    names = "cope rope fox path stick_breaking none pope mapformer cope_signed alibi".split()
    texts = ["shakespeare", "wikitext-2", "code"]
    expected = [(s, text, name) for s in range(5) for text in texts for name in names]
    assert [(*cell.seeds, cell.setting, cell.label) for cell in cells] == expected
    assert len(search.trials(cells)) == 90
    for cell in cells:
        assert cell.search == {"optimizer.learning_rate": (1.6e-2, 3.2e-2, 6.4e-2)}
        assert cell.config.job.blocks
    known = json.loads(FROZEN.with_name("language.json").read_text())
    for cell in cells:
        recipe = ExperimentConfig.from_mapping(
            known["shared"] | known["settings"][cell.setting] | {"encoding": cell.label}
        ).recipe()
        assert cell.config.recipe() == recipe


@pytest.mark.parametrize("setting", language.DATA)
def test_language_has_these_texts(setting, tmp_path, monkeypatch):
    if setting == "code" and platform.python_version() != "3.11.7":
        pytest.skip("the code is the standard library of Python 3.11.7")
    (tmp_path / "DATA").symlink_to(real("tinyshakespeare", "wikitext-2"))
    monkeypatch.chdir(tmp_path)
    cell = next(cell for cell in language.get_cells() if cell.setting == setting)
    (content,) = cell.config.task.create().data_digest().values()
    digests = [of["sha256"][:12] for of in json.loads(content).values()]
    assert tuple(digests) == language.DATA[setting]


def test_cells_of_earlier_versions_are_finished(tmp_path):
    """The archive has what `sweep` wrote when cells were flags."""
    with tarfile.open(ROOT / "experiments" / "results" / "abilities.tar.xz") as archive:
        ours = [member for member in archive if "/cells/cope/seed_1/" in member.name]
        archive.extractall(tmp_path, ours, filter="data")
    cells = [cell for cell in grid_file.read(grid_file.find("abilities")) if cell.label == "cope"]
    grid = Grid(tmp_path / "abilities", cells)
    assert [cell.name for cell in grid.state().finished] == [
        f"{name}, cope, seed 1" for name in SETTINGS
    ]
    assert {row["setting"] for row in grid.records()} == SETTINGS.keys()


def test_a_grid_is_found_by_name_or_path():
    assert Path(grid_file.find("abilities")) == ROOT / "cope_jax" / "grids" / "abilities.py"
    assert grid_file.find("my/grid.py") == "my/grid.py"
    with pytest.raises(
        ConfigError,
        match=r"unknown grid 'abilitie': did you mean 'abilities'.*such as ./abilitie.py",
    ):
        grid_file.find("abilitie")


def test_the_state_is_read_from_disk(tmp_path):
    cells = [cell(name, seed) for name in ("cope", "rope") for seed in range(2)]
    finish(cells[0], tmp_path, 30.0)
    finish(cells[2], tmp_path, 10.0)
    fail(cells[0], tmp_path, "an earlier failure")
    fail(cells[1], tmp_path)
    grid = Grid(tmp_path, cells)
    state = grid.state()
    assert (state.finished, state.failed, state.left) == (
        [cells[0], cells[2]],
        {cells[1]: "error: no"},
        [cells[3]],
    )
    assert grid.seconds_left([cells[1], cells[3]], state.finished) == 40.0
    assert grid.seconds_left([cell("fox")], state.finished) == 20.0
    other = cell(setting="other")
    finish(other, tmp_path, 80.0)
    finished = [*state.finished, other]
    assert grid.seconds_left([cell("fox", setting="other")], finished) == 80.0
    assert grid.seconds_left([cell("fox")], finished) == 20.0
    assert grid.seconds_left([cell("fox", setting="third")], finished) == 40.0
    together = Cell(cell("fox").config, (2, 3), "quick")
    finish(together, tmp_path, 7.0)
    assert grid.seconds_left([together], [together]) == 14.0
    assert grid.seconds_left(cells, []) is None


def test_the_results_are_empty_before_a_cell_is_finished(tmp_path):
    grid = Grid(tmp_path / "new", [cell()])
    assert (grid.records(), grid.environment()) == ([], {})
    results, table = grid.write_results()
    assert json.loads(results.read_text()) == {"records": [], "environment": {}}
    assert table.read_text() == "\n"


def test_a_finished_cell_of_other_settings_is_an_error(tmp_path):
    ours = cell()
    workdirs.Workdir(ours.folder(tmp_path)).open(ours.config, [0])
    finish_file = ours.folder(tmp_path) / "result.json"
    finish_file.write_text('{"records": []}')
    assert Grid(tmp_path, [ours]).state().finished == [ours]
    with pytest.raises(ConfigError, match=r"other settings, .*training\.steps"):
        Grid(tmp_path, [cell(training={"steps": 100})]).train()


def test_a_finished_cell_without_its_config_is_an_error_and_gets_no_other(tmp_path):
    finish(ours := cell(), tmp_path)
    (ours.folder(tmp_path) / "config.json").unlink()
    message = rf"^{ours.folder(tmp_path)} has result.json but not config.json: restore config.json"
    with pytest.raises(ConfigError, match=message) as error:
        Grid(tmp_path, [cell(training={"steps": 100})]).state()
    assert "\n" not in str(error.value)
    assert [path.name for path in ours.folder(tmp_path).iterdir()] == ["result.json"]


def test_the_state_of_a_folder_that_cannot_be_written_to_is_read(tmp_path, monkeypatch):
    finish(ours := cell(), tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert Grid(tmp_path, [ours]).state().finished == [ours]
