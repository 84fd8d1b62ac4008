"""The tables of RESULTS.md are written from archives, which never lose a cell."""

import io
import json
import sys
import tarfile

import pytest

from cope_jax.errors import ConfigError
from cope_jax.evaluation.report import significance
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid import grid_file, search
from cope_jax.runs.grid.grid import Grid
from tests.runs.grid.test_archive import damaged, finish
from tests.runs.grid.test_cells import write_grid
from tools import publish

GRID = """for seed in range(2):
        for name in ("cope", "rope", "fox"):
            for setting in ("near", "far"):
                yield Cell(quick(name), (seed,), setting, search={"optimizer.learning_rate": (1e-3, 2e-3)})
"""


def measured(cell, workdir, error=None):
    """Writes what a finished cell leaves behind: `error`, or errors that follow from its seed."""
    folder = finish(cell, workdir, cell.config.optimizer.learning_rate)
    shared = {"seed": cell.seeds[0], "step": 600, "examples": 512, "parameters": 1000}
    shared |= {"encoding": cell.label, "learning_rate": cell.config.optimizer.learning_rate}
    shared |= {"metric": "sequence_error", "kind": "split", "wall_seconds": 1.0}
    rows = [
        {**shared, "split": split, "value": (cell.seeds[0] + n) / 4 if error is None else error}
        for n, split in enumerate(("in_distribution", "dense"))
    ]
    environment = {"commit": "0123456789abcdef", "jax": "1.2.3", "device_kind": "cpu"}
    loss = {**shared, "split": "in_distribution", "metric": "loss"}
    loss["value"] = cell.config.optimizer.learning_rate * (
        -1 if cell.setting.startswith("near") else 1
    )
    workdirs.write_json(
        folder / "result.json", {"records": [loss, *rows], "environment": environment}
    )


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The workdir of a grid whose trials have ended, and the cells of two encodings but one."""
    monkeypatch.setattr(publish, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(publish, "SEEDS", {"small": 2})
    path = write_grid(tmp_path, GRID)
    monkeypatch.setattr(grid_file, "find", lambda name: path)
    (tmp_path / "results").mkdir()
    cells, folder = grid_file.read(path), tmp_path / "runs"
    for trial in search.trials(cells):
        measured(trial, folder)
    for cell in cells:
        if cell.label == "rope" or (cell.label == "fox" and cell.seeds == (0,)):
            measured(search.choose(cell, folder)[0], folder)
    return folder


def start(*flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["publish", *flags])
    publish.main()


def test_the_tables_of_what_is_complete(workdir, tmp_path, monkeypatch):
    page = tmp_path / "RESULTS.md"
    page.write_text("before\n\n<!-- tables of small -->\nold\n<!-- end -->\n\nbehind\n")
    start("--grid=small", f"--workdir={workdir}", monkeypatch=monkeypatch)
    assert page.read_text().split("\n\n") == [
        "before",
        "<!-- tables of small -->",
        "Trained so far: 6 of 12 cells and 12 trials (commit 0123456789ab, jax 1.2.3, on cpu). The tables have the "
        "encodings with at least 2 seeds on every ability: 1 of 3.",
        "**in distribution**",
        "| encoding | near | far |\n| --- | ---: | ---: |\n| `rope` | 12.5 ± 17.7 | 12.5 ± 17.7 |",
        "**out of distribution**",
        "| encoding | near | far |\n| --- | ---: | ---: |\n| `rope` | 37.5 ± 17.7 | 37.5 ± 17.7 |",
        "Mean ± standard deviation over seeds, in %; out of distribution is the mean over all splits but the first. "
        f"Bold: no other encoding is shown to be better ({significance.TEST}), in a column that shows any difference. "
        "The errors are sequence error: near, far.",
        "**rate**",
        "| encoding | near | far |\n| --- | ---: | ---: |\n| `rope` | 0.002 | 0.001 |",
        "<!-- end -->",
        "behind\n",
    ]
    text = page.read_text()
    start(monkeypatch=monkeypatch)
    assert page.read_text() == text


@pytest.mark.parametrize(("data_seed", "marks"), [("seed", ["", "**"]), ("0", ["", ""])])
def test_the_configs_say_which_seeds_share_test_examples(data_seed, marks, tmp_path, monkeypatch):
    """Two of 512 examples in each of five seeds are a difference only if each had its own."""
    monkeypatch.setattr(publish, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(publish, "SEEDS", {"small": 5})
    means = ("0.39", "0.00")
    body = f"""for seed in range(5):
        for name in ("cope", "rope"):
            yield Cell(quick(name, training={{"data_seed": {data_seed}}}), (seed,), "near")"""
    path = write_grid(tmp_path, body)
    monkeypatch.setattr(grid_file, "find", lambda name: path)
    for cell in grid_file.read(path):
        measured(cell, tmp_path / "runs", error=2 / 512 if cell.label == "cope" else 0.0)
    publish.pack("small", tmp_path / "runs", tmp_path / "results" / "small.tar.xz")
    cope, rope = (f"{mark}{mean} ± 0.00{mark}" for mark, mean in zip(marks, means, strict=True))
    rows = f"| `cope` | {cope} | {cope} | 2.0 |\n| `rope` | {rope} | {rope} | 1.0 |"
    assert rows in publish.tables("small")


def test_without_an_archive_there_are_only_counts(workdir):
    assert publish.tables("small") == (
        "Trained so far: 0 of 12 cells and 0 trials. The tables have the encodings with at least 2 seeds on every "
        "ability: 0 of 3."
    )


def test_an_archive_never_loses_a_cell(workdir, tmp_path):
    path = publish.pack("small", workdir, tmp_path / "small.tar.xz")
    before = path.read_bytes()
    assert publish.pack("small", workdir, path).read_bytes() == before
    cells = [search.recorded(cell, workdir) for cell in grid_file.read(grid_file.find("small"))]
    lost = Grid(workdir, cells).state().finished[-1].folder(workdir)
    (lost / "result.json").unlink()
    with pytest.raises(ConfigError, match=r"has 1 cells .* lacks, such as small/far/cells/rope"):
        publish.pack("small", workdir, path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match=r"elsewhere has no finished cell of small: give the"):
        publish.pack("small", tmp_path / "elsewhere", tmp_path / "new.tar.xz")


def test_a_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "small.tar.xz"
    for _, content in damaged(tmp_path):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{path} is no archive of records: .+$"):
            publish.recorded(path)


def test_records_that_are_nested_too_deeply_are_one_line(tmp_path):
    path, data = tmp_path / "small.tar.xz", b"[" * 100_000
    with tarfile.open(path, "w:xz") as archive:
        member = tarfile.TarInfo("small/cells/rope/seed_0/result.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    with pytest.raises(ConfigError, match=f"^{path} is no archive of records: .*too deeply$"):
        publish.recorded(path)


def test_an_archive_needs_a_grid_and_its_workdir(monkeypatch):
    with pytest.raises(ConfigError, match="give both or neither"):
        start("--grid=small", monkeypatch=monkeypatch)


PAGE = """## Copying words
| encoding | near | far |
| --- | ---: | ---: |
| `cope` | **1.0 ± 0.5**<br>1.2 [0.4, 1.6] | 27.3 (0) |

| encoding | near |
| --- | ---: |
| `cope` | 4.5 |

<!-- published numbers -->
old
<!-- end -->
"""


def test_no_paper_has_a_setting_twice():
    papers = json.loads((publish.EXPERIMENTS / "published.json").read_text(encoding="utf-8"))
    rows = [(paper["paper"], row["row"]) for paper in papers for row in paper["rows"]]
    assert len(set(rows)) == len(rows)


def test_published_numbers_are_next_to_those_of_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "EXPERIMENTS", tmp_path)
    row = {"row": "cope", "printed": ["0", ""], "verdict": "agrees"}
    paper = {"paper": "P", "section": "Copying words", "seeds": 3, "rows": [row]}
    first = paper | {"columns": ["near", "far"]}
    second = paper | {
        "paper": "Q",
        "table": 1,
        "columns": ["near"],
        "rows": [row | {"printed": ["5"]}],
    }
    workdirs.write_json(tmp_path / "published.json", [first, second])
    text = publish.written(PAGE)
    assert "old" not in text and "2 numbers:" in text
    assert "| P (near / far) | `cope` | 0 / – | 1.0 ± 0.5 / 27.3 | 3 | agrees |" in text
    assert "| Q (near) | `cope` | 5 | 4.5 | 3 | agrees |" in text
    assert publish.written(text) == text


def test_tables_of_text_have_paired_differences():
    """The seeds of a text are averaged by block; a text without the base has no differences."""
    rows = []
    for setting, names in (("near", ("rope", "cope")), ("far", ("cope",))):
        for name in names:
            for seed, shift in ((0, 0.0), (1, 0.2)):
                less = 0.3 if name == "cope" else 0.0
                blocks = [[4.0 + shift - less, 9.0], [5.0 + shift - less * 2, 9.0]]
                loss = {"metric": "loss", "value": 4.5 + shift - less, "blocks": blocks}
                of_run = {"setting": setting, "encoding": name, "seed": seed, "split": "test"}
                rows += [of_run | loss, of_run | loss | {"metric": "other_loss", "value": 0.0}]
    lines = publish.losses(rows, "test", "loss", "test").splitlines()
    half = 0.15 * 12.7062  # the quantile of t with one degree of freedom
    low, high = (f"{-0.45 + sign * half:+.3f}".replace("-", "−") for sign in (-1, 1))
    assert lines == [
        "**test**",
        "",
        "| encoding | near | near, less `rope` | far |",
        "| --- | ---: | ---: | ---: |",
        "| `rope` | 4.60 ± 0.14 | – | – |",
        f"| `cope` | 4.30 ± 0.14 | −0.450 [{low}, {high}] | 4.30 ± 0.14 |",
    ]


def test_a_grid_of_text_has_tables_of_what_there_is(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "VIEWS", {"small": {"dense, all": ("sequence_error", "dense")}})
    monkeypatch.setattr(publish, "SEEDS", {"small": 1})
    (workdir / "far" / "cells" / "fox" / "seed_0" / "result.json").unlink()
    publish.pack("small", workdir, tmp_path / "results" / "small.tar.xz")
    text = publish.tables("small")
    assert "with a seed of any text: 2 of 3.\n\n**dense, all**\n\n| encoding | near | far |" in text
    assert "| `fox` | 0.250 | – |" in text and publish.PAIRED in text
    assert "| `rope` | 0.002 | 0.001 |\n| `fox` | 0.002 | – |" in text
