"""An archive has what a grid needs to show its results and to train only what is missing."""

import io
import json
import tarfile

import numpy as np
import pytest

import cope_jax as cj
from cope_jax.errors import ConfigError
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid import archive, search
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid
from tests.runs.grid.test_cells import RECORD, fail

RATES = {"optimizer.learning_rate": (1e-3, 2e-3, 4e-3)}
DIVERGED = 3
ROWS = ({"step": 1, "loss": 1.0}, {"step": 2, "split": "dense", "sequence_error": 0.5})


def finish(cell, workdir, loss=0.5):
    """Writes what a finished cell leaves behind; returns its folder."""
    folder = cell.folder(workdir)
    workdirs.Workdir(folder).open(cell.config, cell.seeds)
    row = {**RECORD, "value": loss, "kind": "split"}
    workdirs.write_json(folder / "result.json", {"records": [row], "environment": {}})
    workdirs.write_json(folder / "environment.json", {})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (folder / "log.txt").write_text("a log\n")
    return folder


def searched(seeds=range(2)):
    config = cj.config("quick", encoding="rope")
    return [Cell(config, (seed,), "quick", search=RATES) for seed in seeds]


def test_an_unpacked_archive_trains_what_is_missing(tmp_path):
    workdir, cells = tmp_path / "run", searched()
    trials = Grid(workdir, search.trials(cells))
    finish(trials.cells[0], workdir, loss=0.5)
    workdirs.Workdir(trials.cells[1].folder(workdir)).open(trials.cells[1].config, (search.SEED,))
    fail(trials.cells[1], workdir, "a loss", DIVERGED)
    finish(trials.cells[2], workdir, loss=0.25)
    chosen, _ = search.choose(cells[1], workdir)
    finish(chosen, workdir)
    cells = [search.recorded(cell, workdir) for cell in cells]
    path = archive.pack(workdir, [cells[1]], tmp_path / "x.tar.xz", "grid", search.ended(trials))
    archive.unpack(path, tmp_path / "other")
    again = Grid(tmp_path / "other" / "grid", search.trials(searched()))
    assert search.left(again) == []
    cells = [search.recorded(cell, again.workdir) for cell in searched()]
    assert [bool(cell.search) for cell in cells] == [True, False]
    assert cells[1].config.optimizer.learning_rate == 4e-3
    assert search.choose(cells[0], again.workdir)[0].config.optimizer.learning_rate == 4e-3
    state = Grid(again.workdir, cells).state()
    assert (state.finished, state.left) == ([cells[1]], [cells[0]])


def test_an_archive_has_records_alone_and_the_same_bytes(tmp_path):
    workdir, cells = tmp_path / "run", [Cell(cj.config("quick"), (seed,)) for seed in range(2)]
    folder = finish(cells[0], workdir)
    finish(cells[1], workdir)
    trial = Cell(cj.config("quick"), (9,))
    finish(trial, workdir)
    failed = Cell(cj.config("quick"), (8,))
    workdirs.Workdir(failed.folder(workdir)).open(failed.config, failed.seeds)
    path = failed.folder(workdir) / "failed.json"
    path.write_text('{"line": "a loss", "status": 3, "log": "runs/log.txt"}')
    packed = archive.pack(workdir, cells, tmp_path / "a.tar.xz", "grid", [trial, failed])
    turned = archive.pack(workdir, cells[::-1], tmp_path / "b.tar.xz", "grid", [failed, trial])
    assert packed.read_bytes() == turned.read_bytes()
    with tarfile.open(packed) as content:
        names = content.getnames()
        assert {(file.uname, file.uid, file.mtime) for file in content} == {("", 0, 0)}
        name = f"grid/{folder.relative_to(workdir)}/metrics.jsonl"
        assert [json.loads(line) for line in content.extractfile(name)] == [ROWS[1]]
        line = content.extractfile(f"grid/{path.relative_to(workdir)}").read()
    assert json.loads(line) == {"line": "a loss", "status": 3}
    assert len(names) == 2 * len(archive.CELL) + len(archive.TRIAL) + len(archive.DIVERGED)
    assert not any("log" in name for name in names)


def test_a_cell_of_an_earlier_version_is_known_by_its_rate(tmp_path):
    """Its config lacks a field that came later."""
    (cell,) = searched(range(1))
    chosen = search._with(cell, {"optimizer.learning_rate": 2e-3})
    path = finish(chosen, tmp_path) / "config.json"
    known = json.loads(path.read_text())
    del known["config"]["training"]["positions"]
    path.write_text(json.dumps(known))
    assert search.recorded(cell, tmp_path).config == chosen.config


def test_an_entry_has_its_own_cells_alone_and_damage_is_one_line(tmp_path):
    workdir = tmp_path / "run"
    cells = [Cell(cj.config("quick", encoding=name), (0,), "quick") for name in ("cope", "rope")]
    for cell in cells:
        finish(cell, workdir)
    path = archive.pack(workdir, cells, tmp_path / "x.tar.xz", "grid")
    archive.unpack(path, tmp_path / "other", ["rope"])
    unpacked = [
        (cell.folder(tmp_path / "other" / "grid") / "result.json").exists() for cell in cells
    ]
    assert unpacked == [False, True]
    for content in (b"", path.read_bytes()[:200], b"no archive"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{path} is no archive of records: .+$"):
            archive.unpack(path, tmp_path / "third")


def damaged(folder):
    """Archives of 100 kB each, as pairs of a name and bytes that are cut or changed in the middle."""
    noise = np.random.default_rng(0).bytes(50_000).hex().encode()
    for kind in ("xz", "gz", "bz2"):
        path = folder / "whole.tar"
        with tarfile.open(path, f"w:{kind}") as archive:
            for name in ("config.json", "result.json"):
                member = tarfile.TarInfo(f"grid/quick/cells/rope/seed_0/{name}")
                member.size = len(noise)
                archive.addfile(member, io.BytesIO(noise))
        whole = path.read_bytes()
        yield f"{kind}, cut", whole[:50_000]
        yield f"{kind}, changed", whole[:50_000] + bytes(100) + whole[50_100:]


def test_every_damage_is_one_line(tmp_path):
    path, known = tmp_path / "x.tar.xz", []
    for name, content in damaged(tmp_path):
        path.write_bytes(content)
        try:
            archive.unpack(path, tmp_path / "other")
        except ConfigError as error:
            assert str(error).startswith(f"{path} is no archive of records: ")
            assert len(str(error).splitlines()) == 1
            known.append(name)
    assert {"xz, cut", "xz, changed", "gz, cut", "bz2, cut"} <= set(known)
