"""Sentences and pictures of heads whose gates are known."""

import io

import numpy as np
import pytest
from rich.console import Console

from cope_jax.evaluation.gates import views
from cope_jax.evaluation.gates.head_scores import HeadScore
from tests.evaluation.results import printed

NAN = float("nan")


def head(number, best, value, at, elsewhere):
    aucs = {"newline": 0.4, "digit": NAN, "sentence end": 0.5} | ({best: value} if best else {})
    return HeadScore(0, number, aucs, best, (value - 0.02, value + 0.02), at, elsewhere, 0.25)


HEADS = [
    head(2, "newline", 0.97, 0.9, 0.05),
    head(0, "newline", 0.80, 0.6, 0.4),
    head(1, "sentence end", 0.55, 0.5, 0.49),
]


def test_sentences_say_what_is_seen():
    assert views.sentences(HEADS, 0.6, most=1) == [
        "The gates of 2 of 3 heads follow a feature of the text, more than chance explains (AUC above 0.60).",
        "Their best features: ends of lines (2).",
        "No head has digits or ends of sentences as its best feature.",
        "Layer 0, head 2: the gates open wider for ends of lines than for other tokens in 97 of 100 pairs; the mean "
        "gate is 0.90 there and 0.05 elsewhere.",
        "Nearly counting, with a mean gate above 0.5 there and below 0.1 elsewhere: 1 of these heads.",
    ]


def test_sentences_say_that_nothing_is_seen():
    assert views.sentences(HEADS, 0.98) == [
        "The gates of 0 of 3 heads follow a feature of the text, more than chance explains (AUC above 0.98).",
        "No head counts any of these features.",
    ]


def test_the_table_has_a_row_for_each_head():
    table = views.ranking(HEADS, 0.6, ["' a' 0.90 [x]", "", ""])
    assert [row[1] for row in table.rows] == ["2", "0", "1"]
    assert {row_number for row_number, _ in table.bold} == {0, 1}
    assert "' a' 0.90 [x]" in printed(table) and table.rows[0][4] == "0.950–0.990"


def test_pieces_are_shaded_by_their_gates_and_lines_break_where_they_do():
    text = views.coloured(["It", " was", ".\n", "\n"], np.array([0.0, 0.5, 1.0, 1.0]))
    assert text.plain == "It was.↵\n↵\n"
    shades = [sum(span.style.bgcolor.triplet) for span in text.spans if span.style.bgcolor]
    assert shades[0] > shades[1] > shades[2] == shades[3]


def test_without_colours_gates_are_below_the_pieces():
    text = views.numbered(["It", " was", ".\n"], np.array([0.0, 0.5, 1.0]), width=11)
    lines = [line.rstrip() for line in text.plain.splitlines()]
    assert lines == ["It    was", "0.00 0.50", ".↵", "1.00"]


def test_lines_break_between_words():
    text = views.coloured(list("the only water"), np.zeros(14))
    console = Console(file=io.StringIO(), width=10)
    console.print(text)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == ["the only", "water"]


def test_the_heat_map_orders_heads_by_layer():
    axes, *_ = views.feature_map(HEADS).axes
    assert axes.patch.get_hatch()  # behind values that are missing
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"layer 0, head {n}" for n in range(3)
    ]
    shown = np.ma.filled(axes.images[0].get_array(), np.nan)
    assert (
        shown.shape == (3, 4)
        and shown[2, 0] == pytest.approx(0.97)
        and np.isnan(shown[:, [1, 3]]).all()
    )
