import itertools
import math

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from cope_jax import tasks
from cope_jax.evaluation.report import grid_cells, page, results_picture, results_table
from cope_jax.evaluation.report.table import Table, has_colours
from tests.evaluation.results import printed

TABLE = Table(
    "[told] in %",
    ["kind", "name", "value"],
    [["a|b", "<unk> [x]\nsecond", "1.0"], ["c", "", "–"]],
    2,
    bold={(0, 1)},
)


def test_markdown_escapes_what_breaks_a_table():
    assert TABLE.markdown().splitlines() == [
        "**[told] in %**",
        "",
        "| kind | name | value |",
        "| --- | --- | ---: |",
        "| a\\|b | **&lt;unk> [x]**<br>second | 1.0 |",
        "| c |  | – |",
    ]


def test_the_terminal_shows_cells_as_they_are():
    lines = [line.split() for line in printed(TABLE).splitlines() if line.strip()]
    assert lines[:2] == [["[told]", "in", "%"], ["kind", "name", "value"]]
    assert lines[3:] == [["a|b", "<unk>", "[x]", "1.0"], ["second"], ["c", "–"]]
    cell = next(iter(TABLE.rich().columns[1].cells))
    assert cell == Text.assemble(("<unk> [x]", "bold"), "\nsecond")
    assert [column.justify for column in TABLE.rich().columns] == ["left", "left", "right"]


@pytest.mark.parametrize("width", [30, 40])
def test_a_narrow_terminal_breaks_words_and_no_numbers(width):
    text = printed(
        Table("", ["encoding", "error"], [["cope(gate=separate_key)+rope", "100.0 ± 0.0"]]), width
    )
    assert "100.0 ± 0.0" in text and "".join(text.split()).count("cope") == 1 and "…" not in text


@pytest.mark.parametrize(
    ("terminal", "variables", "colours"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False)],
)
def test_colours_need_a_terminal_that_has_them(terminal, variables, colours):
    environ = {"TERM": "xterm-256color", **variables}
    assert has_colours(Console(force_terminal=terminal, _environ=environ)) == colours


def test_facts_have_no_headings():
    assert (
        printed(Table("", ["", ""], [["state", "1.0 GiB a device"]])).split()
        == "state 1.0 GiB a device".split()
    )


def errors_of(data_seed):
    shared = {"setting": "copy", "metric": "token_error", "value": 0.5, "examples": 500}
    return [
        shared | {"encoding": name, "seed": seed, "split": split, **data_seed(seed)}
        for name in ("cope", "rope")
        for seed in range(4)
        for split in ("in_distribution", "far")
    ]


@pytest.mark.parametrize(
    ("data_seed", "sets"),
    [
        (lambda seed: {"data_seed": seed}, 4),
        (lambda seed: {"data_seed": 7}, 1),
        (lambda seed: {"data_seed": seed // 2}, 2),
        (lambda seed: {}, 1),
    ],
)
def test_a_column_counts_the_test_sets(data_seed, sets):
    """Seeds whose data have an unknown seed count as one."""
    for splits in (["in_distribution"], ["in_distribution", "far"]):
        column = grid_cells.column_of(errors_of(data_seed), splits)
        assert column.sets == {"cope": sets, "rope": sets}


def test_a_mean_over_splits_of_different_sizes_varies_like_that_of_fewer_examples(rng):
    rows = [
        row | {"examples": 10_000 if row["split"] == "far" else 100}
        for row in errors_of(lambda seed: {})
    ]
    column = grid_cells.column_of(rows, ["in_distribution", "far"])
    shares = (rng.binomial(n, 0.5, 100_000) / n for n in (100, 10_000))
    variance = np.var(np.mean(list(shares), axis=0))
    assert column.examples == pytest.approx(0.25 / variance, rel=0.02)
    assert grid_cells.column_of(rows, ["far"]).examples == 10_000


def test_validation_and_test_of_a_text_are_not_out_of_distribution():
    text = list(perplexities(splits=("validation", "test")))
    other = [row | {"setting": "code"} for row in text]
    known = {"text": stored_task("words"), "code": stored_task("words")}
    tables = grid_cells.create([*text, *other], known)
    assert {view: [*columns] for view, columns in tables.cells.items()} == {
        "validation": ["text", "code", "mean rank"],
        "test": ["text", "code", "mean rank"],
    }
    assert "distribution" not in grid_cells.legend(tables, "Bold")
    copies = [row | {"step": 9} for row in errors_of(lambda seed: {})]
    mixed = grid_cells.create([*text, *copies], known | {"copy": tasks.create("mqar")})
    assert [*mixed.cells] == ["validation", "test", "in distribution", "out of distribution"]
    assert "out of distribution is the mean" in grid_cells.legend(mixed, "Bold")
    alone = [row for row in copies if row["split"] == "in_distribution"]
    once = grid_cells.create([*text, *alone], known | {"copy": tasks.create("mqar")})
    assert [*once.cells] == ["validation", "test", "in distribution"]


def test_all_seeds_share_the_examples_of_a_stored_task():
    rows = errors_of(lambda seed: {"data_seed": seed})
    spam = [row | {"metric": "sequence_error"} for row in rows]
    for task, known, sets in ((tasks.create("mqar"), rows, 4), (stored_task(), spam, 1)):
        headlines = grid_cells.headlines(known, {"copy": task})
        assert set(grid_cells.column_of(headlines, ["in_distribution"]).sets.values()) == {sets}


def stored_task(name="spam"):
    """A task whose examples are in files, without its files."""
    task = object.__new__(tasks.TASKS.get(name))
    task.sweep = ()
    return task


def perplexities(noise=None, splits=("validation",)):
    """Records of five seeds, of which those of cope have the lower perplexity; `noise` is that of
    the difference from block to block.
    """
    for split, name, seed in itertools.product(splits, ("cope", "rope"), range(5)):
        loss = 4.0 + seed / 1000 + 0.1 * (name == "rope")
        shared = {"setting": "text", "encoding": name, "seed": seed, "split": split, "step": 9}
        shared |= {"examples": 6, "wall_seconds": 1.0, "parameters": 9}
        yield shared | {"metric": "perplexity", "value": math.exp(loss)}
        losses = loss + (name == "rope") * (noise or 0) * np.array([3.0, -1, -1, -1])
        blocks = {"blocks": [[float(of_block), 9.0] for of_block in losses]}
        yield shared | {"metric": "loss", "value": loss} | (blocks if noise is not None else {})


@pytest.mark.parametrize(("noise", "best"), [(0.0, True), (0.01, True), (1.0, False), (None, True)])
def test_perplexities_are_compared_on_the_blocks_of_their_losses(noise, best):
    records = list(perplexities(noise))
    tables = grid_cells.create(records, {"text": stored_task("words")})
    (column,) = grid_cells.views_of(tables.fixed)["all splits"].values()
    assert (column.blocks is None) == (noise is None)
    cells = tables.cells["all splits"]["validation"]
    assert {name: cell.best for name, cell in cells.items()} == {"cope": best, "rope": False}


@pytest.mark.parametrize("changed", [("cope", 1), ("rope", 0)])
@pytest.mark.parametrize("blocks", [[[4.0, 9.0]], [[4.0, 9.0]] * 3 + [[4.0, 8.0]]])
def test_blocks_of_another_text_cover_nothing(changed, blocks):
    records = list(perplexities(0.0))
    for row in records:
        if "blocks" in row and (row["encoding"], row["seed"]) == changed:
            row["blocks"] = blocks
    tables = grid_cells.create(records, {"text": stored_task("words")})
    (column,) = grid_cells.views_of(tables.fixed)["all splits"].values()
    assert column.blocks is None and COVERED in tables.uncovered


COVERED = "is not covered"


@pytest.mark.parametrize(
    ("records", "names"),
    [
        (perplexities(0.0), None),
        (perplexities(), "all columns"),
        ([*perplexities(), *perplexities(0.0, ("test",))], "validation"),
    ],
)
def test_a_legend_says_which_columns_lack_the_choice_of_the_text(records, names, tmp_path):
    tables = grid_cells.create(list(records), {"text": stored_task("words")})
    path = page.write(tmp_path / "report.html", "text", tables, [], [], "")
    texts = [results_table.markdown(tables), results_table.latex(tables), path.read_text()]
    for text in texts:
        sentence = f"The choice of the test examples or of the text {COVERED} in {names}."
        assert (sentence in text, COVERED in text) == (names is not None, names is not None)
    captions = [text.get_text() for text in results_picture.picture(tables, "text").texts]
    assert any(COVERED in caption.replace("\n", " ") for caption in captions) == bool(names)


def test_errors_cover_the_choice_of_their_examples_if_their_number_is_known():
    known = errors_of(lambda seed: {"data_seed": seed, "step": 9})
    without = [{name: x for name, x in row.items() if name != "examples"} for row in known]
    mixed = [row | {"setting": "far"} for row in without]
    for records, uncovered in (
        (known, ""),
        (without, "all columns"),
        ([*known, *mixed], "in distribution (far)"),
    ):
        settings = {row["setting"] for row in records}
        tables = grid_cells.create(records, dict.fromkeys(settings, tasks.create("mqar")))
        assert uncovered in tables.uncovered and bool(tables.uncovered) == bool(uncovered)


def test_a_column_of_losses_has_the_means_of_blocks():
    shared = {"setting": "text", "metric": "loss", "split": "test", "value": 2.0}
    rows = [
        shared | {"encoding": name, "seed": seed, "blocks": [[1.0 + seed, 9.0], [3.0, 8.0]]}
        for name in ("cope", "rope")
        for seed in range(2)
    ]
    column = grid_cells.column_of(rows, ["test"])
    assert column.examples is None
    assert column.blocks.keys() == {"cope", "rope"}
    for losses in column.blocks.values():
        assert losses.tolist() == [[1.5, 9.0], [3.0, 8.0]]
    rows[0] = {name: value for name, value in rows[0].items() if name != "blocks"}
    assert grid_cells.column_of(rows[::2], ["test"]).blocks is None
    assert (
        grid_cells.column_of([shared | rows[1], shared | rows[2]], ["test", "other"]).blocks is None
    )
