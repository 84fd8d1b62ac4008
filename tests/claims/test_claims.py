"""Every sentence on results is in its page with the values of the records, and the records support it."""

import dataclasses
import json
import re

import pytest

from cope_jax.evaluation.report import grid_cells, grid_table
from experiments.grids import abilities
from tests.claims import grid, records, tables
from tests.claims.records import README, RESULTS, ROOT

CLAIMS = grid.CLAIMS + tables.CLAIMS
ARCHIVED = records.read()
PAGES = {claim.page: " ".join((ROOT / claim.page).read_text().split()) for claim in (*CLAIMS, *grid.COUNTS)}


def written(claim, found):
    """The words of a claim with the values of the records."""
    return claim.text.format(*claim.values(found))


def is_true(claim, found):
    return claim.holds(found) and written(claim, found) in PAGES[claim.page]


@pytest.mark.parametrize("claim", [*CLAIMS, *grid.COUNTS], ids=lambda claim: claim.text[:60])
def test_the_records_support_what_a_page_says(claim):
    assert claim.holds(ARCHIVED)
    assert written(claim, ARCHIVED) in PAGES[claim.page]


def renamed():
    """Each encoding has the errors of the next one."""
    names = ARCHIVED.names()
    following = dict(zip(names, names[1:] + names[:1], strict=True))
    return [{**row, "encoding": following[row["encoding"]]} for row in ARCHIVED.rows]


def solved():
    """What is learned is not, and the reverse."""
    return [{**row, "value": 1 - row["value"]} for row in ARCHIVED.rows]


OTHERS = [
    dataclasses.replace(ARCHIVED, rows=renamed()),
    dataclasses.replace(ARCHIVED, rows=solved()),
    dataclasses.replace(ARCHIVED, rows=[row for row in ARCHIVED.rows if row["seed"]]),
    dataclasses.replace(ARCHIVED, rows=[{**row, "value": 0.0, "parameters": 1} for row in ARCHIVED.rows]),
    dataclasses.replace(ARCHIVED, number=lambda text: 100 - float(text)),
    dataclasses.replace(ARCHIVED, number=lambda text: 0.5),
]
"""Records that differ from the archived ones."""


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:60])
def test_other_records_do_not_support_it(claim):
    assert not all(is_true(claim, other) for other in OTHERS)


def test_the_tables_and_the_page_are_those_of_the_records():
    names = list(dict.fromkeys(cell.encoding for cell in abilities.get_cells()))
    order = {(setting, name): (n, m) for n, setting in enumerate(records.TASKS) for m, name in enumerate(names)}
    rows = sorted(ARCHIVED.rows, key=lambda row: order[row["setting"], row["encoding"]])
    tables_shown = grid_cells.create(rows, records.TASKS)
    assert " ".join(grid_table.markdown(tables_shown).split()) in PAGES[RESULTS]
    page = (ROOT / "docs" / "abilities.html").read_text()
    held = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])
    assert held["views"] == tables_shown.cells


NO_RESULT = [
    "Encodings with fewer than four seeds in a column cannot be bold.",
    '"Shown" means the same in what follows.',
    "What the figures show, and what they do not:",
    "- **Flip-flop with one layer**, 25 seeds, mean token error in distribution / dense / sparse in %:",
    "- **Recall of more pairs**:",
    "- **Occurrence**:",
    "- **Stack**:",
    "- **Copying**:",
    "- **Steps**:",
    "- **Indirect indexing**:",
    "so this says nothing about PoPE's published 5 % error with a larger model.",
    "- **Two seeds are a first look.** Worth more seeds:",
    "- **Not shown**:",
    "and encodings differ in what they learn in 1,500 steps, not only in what they can learn.",
    "on one CPU core.",
    "Small models learn a task for each, and are tested on longer examples.",
]
"""What the passages below say without being a result."""

PASSAGES = [
    (README, "[No encoding has every ability]", "## Start"),
    (RESULTS, "Encodings with fewer than four seeds", "## Contextual representations"),
    (RESULTS, "no encoding learns all eleven tasks", "- [WikiText-2]"),
]
"""Page, beginning and end of the passages whose every word is a claim or no result."""


@pytest.mark.parametrize(("page", "first", "end"), PASSAGES, ids=lambda text: text[:20])
def test_every_sentence_is_checked(page, first, end):
    text = first + PAGES[page].split(first)[1].split(end)[0]
    claimed = [written(claim, ARCHIVED) for claim in CLAIMS if claim.page == page]
    for words in sorted(claimed + NO_RESULT, key=len, reverse=True):
        text = text.replace(words, " ")
    assert not re.search(r"\w", text), text
