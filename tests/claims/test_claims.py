"""Sentences on results are in their pages with the records' values, which support them."""

import collections
import dataclasses
import re
import statistics

import pytest

from cope_jax import encodings
from tests.claims import grid, language_claims, records
from tests.claims import tables as claims_of_tables
from tests.claims.records import README, RESULTS, ROOT
from tools import publish

CLAIMS = grid.CLAIMS + claims_of_tables.CLAIMS + language_claims.CLAIMS
COUNTS = grid.COUNTS + language_claims.TIMES
ARCHIVED = records.read()
PAGES = {
    claim.page: " ".join((ROOT / claim.page).read_text().split()) for claim in (*CLAIMS, *COUNTS)
}


def written(claim, records):
    """The words of a claim with the values of the records."""
    return claim.text.format(*claim.values(records))


def supports(records, claim):
    """True if records have the values of a claim, and agree with its page."""
    try:
        return bool(claim.holds(records)) and written(claim, records) in PAGES[claim.page]
    except LookupError:
        return False


@pytest.mark.parametrize("claim", [*CLAIMS, *COUNTS], ids=lambda claim: claim.text[:60])
def test_the_records_support_what_a_page_says(claim):
    assert claim.holds(ARCHIVED), (
        f"the records no longer support this in {claim.page}: {claim.text}"
    )
    sentence = written(claim, ARCHIVED)
    assert sentence in PAGES[claim.page], f"write in {claim.page}: {sentence}"


def change(**fields):
    """The rows of records with the results of these functions."""
    return [{**row, **{name: of(row) for name, of in fields.items()}} for row in ARCHIVED.rows]


def shift(names):
    """Each name → the next one."""
    return dict(zip(names, [*names][1:] + [*names][:1], strict=True))


NEXT = shift(ARCHIVED.names())
OTHERS = {
    "names": {
        "rows": change(encoding=lambda row: NEXT[row["encoding"]]),
        "tables": {
            heading: [
                {name: table[other] for name, other in shift(table).items()} for table in tables
            ]
            for heading, tables in ARCHIVED.tables.items()
        },
    },
    "reverse": {
        "rows": change(value=lambda row: 1 - row["value"]),
        "number": lambda text: 100 - float(text),
    },
    "fewer seeds": {"rows": [row for row in ARCHIVED.rows if row["seed"]]},
    "one value": {
        "rows": change(value=lambda _: 0.0, parameters=lambda _: 1),
        "number": lambda _: 0.5,
    },
}
"""Changes of the archived records."""
OTHERS = {name: dataclasses.replace(ARCHIVED, **fields) for name, fields in OTHERS.items()}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:60])
def test_other_records_do_not_support_it(claim):
    supporting = {name for name, other in OTHERS.items() if supports(other, claim)}
    assert supporting != OTHERS.keys()
    if {*re.findall("[a-z_]+", claim.text.lower().replace("-", "_"))} & {*encodings.names()}:
        assert not supporting & {"names", "reverse"}


def test_the_tables_are_those_of_the_records():
    text = (ROOT / RESULTS).read_text()
    assert [match[2] for match in publish.BLOCK.finditer(text)] == list(publish.SEEDS)
    assert publish.written(text) == text, "write the tables by: python -m tools.publish"


NO_RESULT = [
    "**All figures below are of version 1 of the settings.** Test examples may be in the training data, above all "
    "those of arithmetic, parity and count ([shares](../docs/tasks.md#in-the-training-data)): there errors measure "
    "memory too. The [other differences](../docs/tasks.md#two-versions-of-the-settings-of-abilities) from version 2 "
    "are in count, recall, steps and index, in the search of the rate and in the curves.",
    "**For two models it matters whether a test example was in the training data.** Before version 2 was frozen, "
    "three of its cells of arithmetic were run with the rate 1e-3, at commit 95b6012. Measured on 2,000 examples of "
    "both versions,",
    "so three cells say nothing about the versions.",
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
    "- [Abilities, version 2](#abilities-version-2), with a search of rates (thirteen of 32 encodings so far, five "
    "seeds):",
]
"""Passages that are no results."""

PASSAGES = [
    (RESULTS, "**All figures below", "Their [records]"),
    (README, "[No encoding has every ability]", "## Start"),
    (RESULTS, "Encodings with fewer than four seeds", "## Abilities, version 2"),
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


def test_the_table_of_angles_that_add_up_is_that_of_its_records():
    heading = "Angles that tokens add up, and a dropped RoPE"
    table, _dropped = publish.read_tables((ROOT / RESULTS).read_text())[heading]
    columns = {"test": "128", "length=1024": "1,024", "length=4096": "4,096"}
    values = collections.defaultdict(list)
    for content in publish.recorded(ROOT / "experiments" / "results" / "turned.tar.xz").values():
        for row in content["records"]:
            if row["metric"] == "token_perplexity" and row["split"] in columns:
                values[row["encoding"], columns[row["split"]]].append(row["value"])
    shown = {(name, column): table[name][column] for name, column in values}
    assert shown == {
        cell: f"{statistics.mean(of):.2f} ± {statistics.stdev(of):.2f}"
        for cell, of in values.items()
    }
    assert len(shown) == 3 * len(table) and {len(of) for of in values.values()} == {3}
