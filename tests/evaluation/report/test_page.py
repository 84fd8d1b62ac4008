"""The page of results, as text and in a real browser."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.evaluation.report import grid_cells, page, page_charts, results_picture, results_table
from cope_jax.evaluation.report.plots import error_by_length
from tests.evaluation.browser import browse, needs_browser

MQAR = tasks.create("mqar")
LEVELS = [split for _, split in MQAR.sweep]
VIEWS = ("in distribution", "out of distribution")
# Task → encoding → the errors of four seeds in distribution, then those out of distribution.
ERRORS = {
    "recall": {
        "cope": ([0.0] * 4, [0.1, 0.12, 0.11, 0.11]),
        "rope": ([0.5, 0.51, 0.49, 0.5], [0.8, 0.9, 0.7, 0.8]),
    },
    "stack <b>": {
        "cope": ([0.3, 0.1, 0.2, 0.2], [0.5] * 4),
        "rope": ([0.2, 0.3, 0.1, 0.2], [0.4, 0.5, 0.6, 0.5]),
    },
}


def rows(kind="split"):
    for setting, encodings in ERRORS.items():
        for encoding, splits in encodings.items():
            for split, seeds in zip(("in_distribution", "longer"), splits, strict=True):
                for seed, value in enumerate(seeds):
                    yield {
                        "setting": setting,
                        "encoding": encoding,
                        "seed": seed,
                        "split": split if kind == "split" else LEVELS[seed],
                        "kind": kind,
                        "metric": "token_error",
                        "value": value,
                        "parameters": 1000,
                        "wall_seconds": 20.0 + seed,
                        "memory_gib": 0.5 + seed,
                        "examples": 500,
                        "data_seed": seed,
                        "step": 200,
                    }


def write(folder, records=None, settings=tuple(ERRORS)):
    records = [*rows(), *rows("sweep")] if records is None else records
    records = [row for row in records if row["setting"] in settings]
    curves = [
        {**row, "step": step, "token_error": row["value"]} for row in records for step in (100, 200)
    ]
    runs = [
        page.PageRun(
            settings[0],
            "cope" if seed < 3 else "rope",
            seed,
            f"train --seed={seed}",
            f"cells/{seed}",
            "42 s",
            "0123abc",
            {"training.steps": 200, "training.data_seed": seed},
        )
        for seed in range(4)
    ]
    tables, costs = known(records, settings), {"cope": {"decoding": 2.0}, "rope": {"decoding": 0.5}}
    return page.write(folder / "report.html", "A <grid>", tables, curves, runs, "four seeds", costs)


def known(records, settings=tuple(ERRORS)):
    return grid_cells.create(list(records), dict.fromkeys(settings, MQAR))


def content(path):
    script = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', path.read_text(), re.DOTALL
    )
    return json.loads(script[1])


def test_cells_say_what_is_shown(tmp_path):
    data = content(write(tmp_path))
    assert list(data["views"]) == ["in distribution", "out of distribution"]
    view = data["views"]["in distribution"]
    assert list(view) == ["recall", "stack <b>", "mean rank"]
    assert view["recall"]["cope"]["text"] == "0.0 ± 0.0"
    assert data["conditions"]["in distribution"] == " in %, 200 steps, 4 seeds"
    assert data["metrics"]["recall"] == "token error"
    assert data["levels"]["recall"]["title"] == "pairs of keys and values"
    assert not any(cell["few"] for cell in view["recall"].values())
    first = [row for row in rows() if row["seed"] < 3]
    cells = content(write(tmp_path, first))["views"]["in distribution"]["recall"]
    assert all(cell["few"] for cell in cells.values())
    assert view["recall"]["cope"]["best"]
    assert not view["recall"]["rope"]["best"]
    assert "solved by 4 of 4 seeds (95 % interval: 40 to 100 %)" in view["recall"]["cope"]["tip"]
    assert "worst 51 %, best 49 %\nsolved by 0 of 4" in view["recall"]["rope"]["tip"]
    assert not any(cell["best"] for cell in view["stack <b>"].values())  # no difference is shown
    assert view["mean rank"]["cope"]["text"] == "1.2"  # first, and a shared place
    assert data["views"]["out of distribution"]["stack <b>"]["rope"]["mean"] == pytest.approx(0.5)


def test_places_are_those_among_the_encodings_that_all_columns_have():
    third = [row | {"encoding": "fox", "value": 1.0} for row in rows() if row["encoding"] == "rope"]
    columns = known([*rows(), *third]).cells["in distribution"]
    places = {name: cell.mean for name, cell in columns["mean rank"].items()}
    assert places == {"cope": 1.25, "rope": 1.75, "fox": 3.0}


def test_one_task_has_a_column_for_each_split(tmp_path):
    data = content(write(tmp_path, settings=("recall",)))
    assert {name: list(columns) for name, columns in data["views"].items()} == {
        "all splits": ["in distribution", "longer", "mean rank"]
    }


def test_the_tables_as_markdown():
    lines = results_table.markdown(known(rows())).splitlines()
    assert lines[:3] == [
        "**in distribution**",
        "",
        "| encoding | recall | stack &lt;b> | mean rank |",
    ]
    assert lines[4:6] == [
        "| `cope` | **0.0 ± 0.0** | 20.0 ± 8.2 | 1.2 |",
        "| `rope` | 50.0 ± 0.8 | 20.0 ± 8.2 | 1.8 |",
    ]
    assert lines[7] == "**out of distribution**"
    assert lines[-1].startswith("Mean ± standard deviation over seeds, in %;")
    assert "exact rank sum test" in lines[-1]
    assert lines[-1].endswith("The errors are token error: recall, stack &lt;b>.")


def test_the_tables_for_latex(tmp_path):
    changed = [row | {"encoding": row["encoding"].replace("rope", "my_rope")} for row in rows()]
    first, second, third = results_table.latex(known(changed)).split("\n\n")
    assert (first, third.splitlines()[:2]) == (
        r"% needs \usepackage{booktabs}",
        [r"\begin{table}", r"\centering"],
    )
    assert second.splitlines()[2].startswith(r"\caption{Errors, in distribution. Mean")
    assert second.splitlines()[2].endswith("The errors are token error: recall, stack <b>.}")
    assert second.splitlines()[3:] == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"encoding & recall & stack <b> & mean rank \\",
        r"\midrule",
        r"\texttt{cope} & \textbf{0.0 $\pm$ 0.0} & 20.0 $\pm$ 8.2 & 1.2 \\",
        r"\texttt{my\_rope} & 50.0 $\pm$ 0.8 & 20.0 $\pm$ 8.2 & 1.8 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    cells = content(write(tmp_path, changed))["views"]["in distribution"]  # the page marks the same
    assert [name for column in cells.values() for name, cell in column.items() if cell["best"]] == [
        "cope"
    ]


def test_the_tables_as_a_picture():
    left, right = results_picture.picture(known(rows()), "A grid").axes
    assert [axes.get_title() for axes in (left, right)] == list(VIEWS)
    texts = {text.get_position(): (text.get_text(), text.get_fontweight()) for text in left.texts}
    assert texts == {
        (0, 0): ("0.0\n± 0.0", "bold"),
        (1, 0): ("20.0\n± 8.2", "normal"),
        (0, 1): ("50.0\n± 0.8", "normal"),
        (1, 1): ("20.0\n± 8.2", "normal"),
    }
    np.testing.assert_allclose(left.images[0].get_array(), [[0, 0.2], [0.5, 0.2]])


@pytest.mark.parametrize("encoding", ["cope", "cope(gate=value,npos_max=64)"])
def test_a_picture_of_one_encoding_has_room_for_its_headings(encoding, tmp_path):
    """Otherwise Matplotlib warns that the axes have no size, and warnings are errors here."""
    records = [row | {"encoding": encoding} for row in rows() if row["encoding"] == "cope"]
    tables = known(records)
    cells = {
        view: {f"the setting {heading}": column for heading, column in columns.items()}
        for view, columns in tables.cells.items()
    }
    for shown in (tables, dataclasses.replace(tables, cells=cells)):
        results_picture.picture(shown, "A grid").savefig(tmp_path / "table.png")


def test_bands_are_over_seeds(tmp_path):
    data = content(write(tmp_path))
    point = next(
        p
        for p in data["curves"]
        if (p["setting"], p["encoding"], p["split"]) == ("recall", "rope", "longer")
    )
    assert (point["low"], point["high"]) == (0.7, 0.9)
    assert point["mean"] == pytest.approx(0.8)
    levels = [p for p in data["sweep"] if (p["setting"], p["encoding"]) == ("recall", "cope")]
    assert [p["level"] for p in levels] == [value for value, _ in MQAR.sweep[:4]]
    assert (data["cost"][0]["seconds"], data["cost"][0]["GiB"]) == (21.5, 3.5)
    assert [point["steps to solve"] for point in data["cost"][:2]] == [100, "not solved"]
    assert [point["decoding"] for point in data["cost"]] == [2.0, 0.5] * 2


def test_runs_have_their_errors_and_what_differs_in_their_configs(tmp_path):
    data = content(write(tmp_path))
    assert data["shared"] == {"recall": {"training.steps": 200}}
    assert data["runs"][1]["config"] == {"training.data_seed": 1}
    assert data["runs"][3]["errors"] == {"in distribution": 0.5, "longer": 0.8}
    assert data["runs"][3]["commit"] == "0123abc"


def test_a_setting_is_solved_from_the_step_on_after_which_its_error_stays_low():
    errors = {
        0: (0.5, 0.0, 0.2, 0.009, 0.0),
        1: (0.5, 0.2, 0.0, 0.0, 0.0),
        2: (0.3, 0.3, 0.3, 0.3, 0.01),
    }
    curves = [
        {"setting": "recall", "encoding": "cope", "seed": seed, "step": 100 * n, "split": split, "token_error": value}
        for seed, values in errors.items()
        for n, value in reversed(list(enumerate(values, start=1)))
        for split in ("in_distribution", "longer")
        if split == "in_distribution" or value == 0.0
    ]  # fmt: skip
    solved = page_charts.steps_to_solve(curves, {"recall": MQAR})
    assert solved == {("recall", "cope"): 400}
    assert page_charts.steps_to_solve([row for row in curves if row["seed"]], {"recall": MQAR}) == {
        ("recall", "cope"): math.inf
    }


@pytest.mark.parametrize(
    "name", [name for name in tasks.names() if tasks.TASKS.get(name).sweep_label]
)
def test_the_axis_of_levels_is_that_of_the_plot(name):
    task = tasks.create(
        name, **({"tokenizer": "bytes", "length": 16, "sweep": (16, 32)} if name == "text" else {})
    )
    measured = {
        "setting": "s",
        "encoding": "cope",
        "metric": task.metric,
        "kind": "sweep",
        "seed": 0,
        "step": 9,
    }
    records = [{**measured, "split": split, "value": 0.5} for _, split in task.sweep]
    (axes,) = error_by_length(task, records, ["cope"]).axes
    points = page_charts.level_points(records, {"s": task})
    shown = page_charts.level_axes(points, {"s": task})["s"]
    ticks = axes.get_xticks().tolist()
    assert (
        shown["axis"]["values"]
        == [point["level"] for point in points]
        == ticks
        == [x for x, _ in task.sweep]
    )
    assert (shown["title"], shown["scale"].get("type", "linear")) == (
        axes.get_xlabel(),
        axes.get_xscale(),
    )
    if name == "flip_flop":
        assert (shown["title"], ticks) == ("ignored instructions (%)", [10, 50, 80, 90, 98])


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    broken = [row | {"value": math.nan} if row["encoding"] == "rope" else row for row in rows()]
    assert (
        content(write(tmp_path, broken))["views"]["in distribution"]["recall"]["rope"]["text"]
        == "not finite"
    )


def test_errors_above_100_percent_are_possible(tmp_path):
    """Those of probes are divided by the error of chance."""
    above = [
        row | {"metric": "normalised_error", "value": 1.1 + row["value"]}
        for row in rows()
        if row["setting"] == "recall"
    ]
    runs = [page.PageRun("recall", "cope", 0, "train", "cells/0", "42 s")]
    path = page.write(
        tmp_path / "p.html",
        "probes",
        grid_cells.create(above, {"recall": tasks.create("probes")}),
        [],
        runs,
        "",
    )
    assert content(path)["views"]["all splits"]["longer"]["rope"]["text"] == "190.0 ± 8.2"


def test_one_test_example_is_no_difference(tmp_path):
    """One wrong example of 500 in each of four seeds is no difference."""
    one_example = [
        row | {"value": 0.002 * (row["encoding"] == "rope")}
        for row in rows()
        if row["setting"] == "recall"
    ]
    assert not any(
        cell["best"]
        for cell in content(write(tmp_path, one_example))["views"]["all splits"]["longer"].values()
    )


def test_the_page_is_one_file_without_addresses(tmp_path):
    path = write(tmp_path)
    text = path.read_text()
    assert path.stat().st_size < 2_000_000
    assert "<title>A &lt;grid&gt;</title>" in text
    ours = text.replace(page.library(), "")
    assert len(ours) < 50_000
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=|https?://", ours)


PROBE = """
const rows = () => all("#errors tbody tr").map(row => row.cells[0].textContent);
Object.assign(found, {first: rows(), charts: all(".chart svg").length});
  const filter = document.getElementById("filter");
  filter.value = "ROPE"; filter.dispatchEvent(new Event("input")); found.filtered = rows();
  filter.value = ""; filter.dispatchEvent(new Event("input"));
  const header = name => all("#errors th button").find(button => button.textContent === name);
  header("recall").click(); found.rising = rows();
  header("recall").click(); found.falling = rows();
  found.sort = header("recall").parentNode.getAttribute("aria-sort");
  const cell = document.querySelector("#errors tbody td[tabindex]"); cell.dispatchEvent(new Event("mouseenter"));
  found.tip = document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
  found.closed = document.getElementById("tip").hidden;
  found.conditions = document.getElementById("conditions").textContent;
  found.notes = all("#errors .shown").map(note => note.parentNode.querySelector("button").textContent);
  const view = document.getElementById("view");
  view.value = "out of distribution"; view.dispatchEvent(new Event("change"));
  found.other = document.querySelector("#errors tbody td[tabindex]").textContent;
  document.getElementById("runs").open = true;
  found.wide = document.documentElement.scrollWidth > innerWidth;
await new Promise(done => setTimeout(done, 300));
found.runs = all("#cells tbody tr").length;
const chart = document.getElementById("curves"), drawn = chart.querySelector("svg").getBoundingClientRect();
found.used = drawn.width / chart.clientWidth; found.cut = chart.scrollWidth > chart.clientWidth;
found.folders = all("#cells a").map(node => node.getAttribute("href"));
const cells = row => [...row.cells].map(cell => cell.textContent), by = document.getElementById("by");
found.costs = all("#costs tr").map(cells);
found.by = [...by.options].map(option => option.textContent);
by.value = "decoding"; await by.onchange(); found.cheapest = all("#costs tbody th").map(node => node.textContent);
found.axis = document.querySelector("#cost svg").textContent;
all("#errors tbody a").find(node => node.textContent === "rope").click();
await new Promise(done => setTimeout(done, 300));
found.row = {text: document.getElementById("row").textContent, errors: rows(), runs: all("#cells tbody tr").map(cells)};
found.row.curves = document.querySelector("#curves svg").textContent;
found.shared = document.getElementById("shared").textContent;
document.querySelector("#row a").click();
await new Promise(done => setTimeout(done, 300));
found.all = [rows(), document.getElementById("row").hidden, all("#cells tbody tr").length];
"""


@needs_browser
def test_the_page_works_in_a_browser(tmp_path):
    shown = browse(write(tmp_path), tmp_path, PROBE, "--window-size=1200,900")
    assert shown["errors"] == []
    assert shown["charts"] == 3
    assert shown["first"] == ["cope", "rope"]
    assert shown["filtered"] == ["rope"]
    assert (shown["rising"], shown["falling"], shown["sort"]) == (
        ["cope", "rope"],
        ["rope", "cope"],
        "descending",
    )
    assert shown["tip"].startswith("rope, recall\nmean 50 %, median 50 %")
    assert shown["closed"]
    assert shown["notes"] == ["stack <b>"]
    assert shown["conditions"] == "token error in %, 200 steps, 4 seeds"
    assert shown["other"] == "11.0 ± 0.8"
    assert shown["runs"] == 4
    assert shown["folders"] == ["cells/0", "cells/1", "cells/2", "cells/3"]
    head, first, second = shown["costs"]
    assert head == ["encoding", "mean error over splits", "training time of a seed in s", "parameters",
        "peak memory in GiB", "steps to solve", "decoding"]  # fmt: skip
    assert first == ["cope", "5.5 %", "21.5", "1,000", "3.5", "100", "2"]
    assert second == ["rope", "65 %", "21.5", "1,000", "3.5", "not solved", "0.5"]
    assert shown["by"] == head[2:]
    assert shown["cheapest"] == ["rope", "cope"] and "decoding" in shown["axis"]
    assert shown["row"]["text"] == "Only rope: its errors, curves and runs. All encodings"
    assert shown["row"]["errors"] == ["rope"]
    assert shown["row"]["runs"] == [["recall", "rope", "3", "42 s", "in distribution 50 %, longer 80 %", "folder",
        "0123abc", "train --seed=3", "training.data_seed=3"]]  # fmt: skip
    assert "rope" in shown["row"]["curves"] and "cope" not in shown["row"]["curves"]
    assert shown["shared"] == "Config of all runs of recalltraining.steps=200"
    assert shown["all"] == [["cope", "rope"], True, 4]
    assert 0.8 < shown["used"] <= 1 and not shown["cut"]


@needs_browser
def test_rows_without_a_number_are_last_and_charts_are_labelled(tmp_path):
    changed = [
        row
        | {"split": row["split"].replace("longer", "dense")}
        | ({"value": math.nan} if row["encoding"] == "cope" else {})
        for row in (*rows(), *rows("sweep"))
        if row["setting"] == "recall"
    ]
    script = """
      const names = () => all("#errors tbody tr").map(row => row.cells[0].textContent);
      const header = () => all("#errors th button")[1];
      header().click(); found.rising = names(); header().click(); found.falling = names();
      found.level = document.querySelector("#sweep svg").textContent;
      found.curves = document.querySelector("#curves svg").textContent;
    """
    shown = browse(write(tmp_path, changed, ("recall",)), tmp_path, script)
    assert (shown["errors"], shown["rising"], shown["falling"]) == (
        [],
        ["rope", "cope"],
        ["rope", "cope"],
    )
    assert "pairs of keys and values" in shown["level"]
    assert 0 <= shown["curves"].index("in distribution") < shown["curves"].index("dense")


@needs_browser
@pytest.mark.slow
def test_the_page_fits_a_phone_and_is_dark_where_wanted(tmp_path):
    flags = (
        "--window-size=500,800",
        "--force-dark-mode",
        "--blink-settings=preferredColorScheme=0",
    )
    shown = browse(write(tmp_path), tmp_path, PROBE, *flags)
    assert shown["errors"] == []
    assert not shown["wide"] and not shown["cut"]
    light = browse(tmp_path / "report.html", tmp_path, "")["paper"]
    assert shown["paper"] != light


@needs_browser
@pytest.mark.slow
def test_two_thousand_runs(tmp_path):
    records = [
        {
            **row,
            "setting": f"task {number}",
            "encoding": f"encoding {row['seed']}-{other}",
            "seed": seed,
        }
        for row in list(rows())[:4]
        for number in range(10)
        for other in range(10)
        for seed in range(5)
    ]
    path = page.write(
        tmp_path / "report.html",
        "many",
        known(records, [f"task {number}" for number in range(10)]),
        [
            {**row, "step": step, "token_error": row["value"]}
            for row in records
            for step in range(5)
        ],
        [page.PageRun("task", "cope", seed, "train", "folder", "42 s") for seed in range(2000)],
        "",
    )
    assert path.stat().st_size < 10_000_000
    shown = browse(path, tmp_path, 'found.rows = all("#errors tbody tr").length;')
    assert (shown["rows"], shown["errors"]) == (40, [])
    assert shown["milliseconds"] < 2000
