r"""Writes the tables of experiments/RESULTS.md from the archived records of grids.

python -m tools.publish
python -m tools.publish --grid=abilities_v2 --workdir=runs/abilities_v2

The second command first writes experiments/results/GRID.tar.xz, with the finished cells and trials
of the workdir of a sweep. After `tar -xJf experiments/results/GRID.tar.xz -C runs`, `cope-jax sweep`
trains only what is missing. In RESULTS.md everything between the line `<!-- tables of GRID -->` and
the next `<!-- end -->` is replaced, and below `<!-- published numbers -->` the table of
experiments/published.json, whose column of our numbers comes from the tables of RESULTS.md.
"""

import argparse
import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cope_jax.cli.exits import clear_errors
from cope_jax.errors import ConfigError, first_line
from cope_jax.evaluation.report import grid_cells, page, results_table, significance
from cope_jax.evaluation.report.significance import Paired, paired
from cope_jax.evaluation.report.table import MISSING, Table
from cope_jax.runs.grid import archive, grid_file, search
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.cell_process import FAILED
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.records import Record
from cope_jax.storage.files import parse_json, write_atomically
from cope_jax.training.metrics import PLAIN

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SEEDS = {"abilities": 1, "abilities_v2": 5, "language": 1}
"""The number of seeds in every setting from which on the tables of a grid have an encoding; those of
a grid in `VIEWS` have it from one seed in any setting.
"""
VIEWS = {
    "language": {
        "test": ("loss", "test"),
        "test in windows of 8 times the length of training": ("loss", "length=1024"),
        "repeated pairs of the test": ("repeated_loss", "test"),
        "other tokens of the test": ("other_loss", "test"),
    }
}
"""The tables of grids of text: each has a loss on a split."""
BASE = "rope"
"""The encoding whose losses are subtracted in paired differences."""
PAIRED = (
    f"Losses in nats per token, mean ± standard deviation over seeds. Less `{BASE}`: the mean difference on the same "
    "blocks of the text, with the losses of a block averaged over seeds, and its 95 % interval by the paired t test "
    "over at most six stretches of blocks. The interval covers the choice of the text, not that of the seeds. "
    "Bold: no other encoding is shown to be better, by "
    f"{significance.TEST}, and by the paired test."
)
BLOCK = re.compile(r"(<!-- tables of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PUBLISHED = re.compile(r"(<!-- published numbers -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Writes the archive of --grid, and all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", help="name of the grid whose archive is written")
    parser.add_argument("--workdir", type=Path, help="workdir of its sweep")
    given = parser.parse_args()
    if (given.grid is None) != (given.workdir is None):
        raise ConfigError("an archive needs both --grid and --workdir: give both or neither")
    if given.grid is not None:
        path = EXPERIMENTS / "results" / f"{given.grid}.tar.xz"
        print(f"written: {pack(given.grid, given.workdir, path)}")
    path = EXPERIMENTS / "RESULTS.md"
    print(f"written: {write_atomically(path, written(path.read_text(encoding='utf-8')))}")


def pack(name: str, workdir: Path, path: Path) -> Path:
    """Writes the archive of a grid. ConfigError: the archive at `path` has more than the workdir."""
    cells = grid_file.read(grid_file.find(name))
    ended = search.ended(Grid(workdir, search.trials(cells)))
    finished = Grid(workdir, [search.recorded(cell, workdir) for cell in cells]).state().finished
    folders = {Path(name, cell.folder(Path())).as_posix() for cell in (*finished, *ended)}
    known = recorded(path) if path.exists() else {}
    if lost := {file.rpartition("/")[0] for file in known} - folders:
        raise ConfigError(
            f"{path} has {len(lost)} cells that {workdir} lacks, such as {min(lost)}: unpack it there"
        )
    if not folders:
        raise ConfigError(
            f"{workdir} has no finished cell of {name}: give the workdir of its sweep"
        )
    return archive.pack(workdir, finished, path, name, ended)


def written(text: str) -> str:
    """The text of RESULTS.md with the tables of its grids."""
    text = BLOCK.sub(lambda match: f"{match[1]}\n{tables(match[2])}\n\n{match[3]}", text)
    return PUBLISHED.sub(lambda match: f"{match[1]}\n{published(text)}\n\n{match[2]}", text)


def published(text: str) -> str:
    """The numbers that papers print, and those of the tables of RESULTS.md."""
    sections, rows, count = read_tables(text), [], 0
    papers = json.loads((EXPERIMENTS / "published.json").read_text(encoding="utf-8"))
    for paper in papers:
        measured = sections[paper["section"]][paper.get("table", 0)]
        for row in paper["rows"]:
            cells = measured[row["row"]]
            ours = [re.split(r"<br>| \(", cells[column])[0] for column in paper["columns"]]
            count += sum(map(bool, row["printed"]))
            printed = " / ".join(number or "–" for number in row["printed"])
            splits = " / ".join(paper["columns"])
            setting = f"{paper['paper']} ({splits})" if row is paper["rows"][0] else ""
            numbers = printed, " / ".join(ours), str(paper["seeds"])
            rows.append([setting, f"`{row['row']}`", *numbers, row["verdict"]])
    columns = ["paper and setting", "encoding", "printed", "ours", "seeds", "verdict"]
    table = Table("", columns, rows, text_columns=len(columns)).markdown()
    return f"{count} numbers:\n\n{table}"


def tables(name: str) -> str:
    """The tables of a grid; of one with a search also what is trained, and the rates."""
    cells, finished, results = archived(name)
    settings = {cell.setting: cell.config.task for cell in cells}
    labels = list(dict.fromkeys(cell.label for cell in cells))
    counts = Counter((cell.label, cell.setting) for cell in finished)
    every = max if name in VIEWS else min
    least = {label: every(counts[label, setting] for setting in settings) for label in labels}
    complete = [label for label in labels if least[label] >= SEEDS[name]]
    rows = rows_of({cell: of for cell, of in finished.items() if cell.label in complete})
    parts = []
    if cells[0].search:
        environments = [content["environment"] for content in finished.values()]
        ended = {Path(name, trial.folder(Path())).as_posix() for trial in search.trials(cells)}
        trials = sum(file.rpartition("/")[0] in ended for file in results)
        trained = f"{len(finished):,} of {len(cells):,} cells and {trials:,} trials"
        least_seeds = f"at least {SEEDS[name]} seeds on every ability"
        having = "a seed of any text" if name in VIEWS else least_seeds
        parts.append(
            f"Trained so far: {trained}{versions(environments)}. The tables have the encodings with {having}: "
            f"{len(complete)} of {len(labels)}."
        )
    if rows and name in VIEWS:
        parts += [*(losses(rows, title, *view) for title, view in VIEWS[name].items()), PAIRED]
    elif rows:
        tasks = {setting: task.create() for setting, task in settings.items()}
        parts.append(results_table.markdown(grid_cells.create(rows, tasks)).rstrip())
    if rows and cells[0].search:
        chosen = {(row["encoding"], row["setting"]): f"{row['learning_rate']:g}" for row in rows}
        rates = [
            [f"`{label}`", *(chosen.get((label, setting), MISSING) for setting in settings)]
            for label in complete
        ]
        parts.append(Table("rate", ["encoding", *settings], rates).markdown())
    return "\n\n".join(parts)


def archived(name: str) -> tuple[list[Cell], dict[Cell, Record], dict[str, Record]]:
    """The cells of a grid, the archived results of finished ones, and other archived records."""
    cells = list(grid_file.read(grid_file.find(name)))
    path = EXPERIMENTS / "results" / f"{name}.tar.xz"
    others = recorded(path) if path.exists() else {}
    finished = {
        cell: others.pop(key)
        for cell in cells
        if (key := Path(name, cell.folder(Path()), "result.json").as_posix()) in others
    }
    return cells, finished, others


def rows_of(results: Mapping[Cell, Record]) -> list[Record]:
    """The records of cells, with the setting and the seed of the data of each."""
    return [
        {**row, "setting": cell.setting, "data_seed": cell.config.training.data_seed}
        for cell, content in results.items()
        for row in content["records"]
    ]


def losses(rows: Sequence[Record], title: str, metric: str, split: str) -> str:
    """The table of a loss: for each setting its mean over seeds, and the paired difference to `BASE`."""
    settings: dict[str, list[Record]] = {}
    for row in rows:
        if (row["metric"], row["split"]) == (metric, split):
            settings.setdefault(row["setting"], []).append(row)
    cells: dict[str, dict[str, grid_cells.Cell]] = {}
    for setting, chosen in settings.items():
        column = grid_cells.column_of(chosen, [split])
        cells |= grid_cells.cells_of({setting: column}, PLAIN)
        blocks = dict(column.blocks or {})
        base = blocks.pop(BASE, None)
        pairs = {} if base is None else {name: paired(of, base) for name, of in blocks.items()}
        shown = {
            name: grid_cells.Cell(pair.mean, _interval(pair), "")
            for name, pair in pairs.items()
            if pair
        }
        cells |= {f"{setting}, less `{BASE}`": shown} if shown else {}
    labels = list(dict.fromkeys(row["encoding"] for row in rows))
    return results_table.results_table(title, labels, cells, "`").markdown()


def _interval(pair: Paired) -> str:
    return f"{pair.mean:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]".replace("-", "−")


def versions(environments: Sequence[Record]) -> str:
    """The commits, versions and devices of cells, as the end of a sentence; "" without cells."""
    if not environments:
        return ""
    first, *others = environments
    return f" ({page.versions({**first, 'others': others})})"


def recorded(path: Path) -> dict[str, Record]:
    """The records of cells and trials in an archive, by the name of their file.

    ConfigError: the archive is damaged.
    """
    try:
        with tarfile.open(path) as file:
            return {
                member.name: parse_json((file.extractfile(member) or io.BytesIO()).read())
                for member in file
                if member.isfile() and member.name.endswith(("/result.json", f"/{FAILED}"))
            }
    except (*archive.DAMAGE, ValueError) as error:
        raise ConfigError(f"{path} is no archive of records: {first_line(error)}") from error


def read_tables(page: str) -> dict[str, list[dict[str, dict[str, str]]]]:
    """The tables below each heading of a page; a row is named by its first cell, or two."""
    by_heading: dict[str, list[dict[str, dict[str, str]]]] = {}
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        blocks = re.findall(r"^\|.*\n\| ?-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
        heads = re.findall(r"^(\|.*)\n\| ?-", text, re.MULTILINE)
        by_heading[heading] = [
            _named(_cells(head), [_cells(line) for line in block.splitlines()])
            for head, block in zip(heads, blocks, strict=True)
        ]
    return by_heading


def _named(head: list[str], rows: list[list[str]]) -> dict[str, dict[str, str]]:
    firsts = [row[0] for row in rows]
    names = [row[0] if firsts.count(row[0]) == 1 else ", ".join(row[:2]) for row in rows]
    return {name: dict(zip(head, row, strict=True)) for name, row in zip(names, rows, strict=True)}


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [re.sub(r"[*`]", "", cell).strip() for cell in cells]


if __name__ == "__main__":
    with clear_errors():
        main()
