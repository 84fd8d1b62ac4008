"""The page of the gates, as text and in a real browser."""

import html
import json
import re

import numpy as np
import pytest

from cope_jax.evaluation.gates import viewer
from cope_jax.evaluation.gates.maps import Inspection
from tests.evaluation.browser import browse, needs_browser

TOKENS = ("a", " ", "<b>", "++;", "print")


@pytest.fixture
def seen():
    rng = np.random.default_rng(0)
    gates = np.tril(rng.uniform(size=(2, 3, 5, 5))).astype(np.float32)
    gates[1, 0, 3, :4] = [0.25, 0.5, 1.0, 0.0]
    positions = np.cumsum(gates[..., ::-1], axis=-1)[..., ::-1]
    maps = {
        "positions": positions,
        "attention": gates / gates.sum(axis=-1, keepdims=True),
        "gates": gates,
    }
    return Inspection(TOKENS, maps, 3, (1,), (0, 2), "a", 0.5)


def content(text):
    return json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1]
    )


def test_rows_follow_each_other(seen):
    data = content(viewer.page(seen, "x"))
    assert list(data["maps"]) == ["gates", "attention", "positions"]
    assert (data["layers"], data["heads"], data["tokens"], data["query"]) == (
        [1],
        [0, 2],
        list(TOKENS),
        3,
    )
    assert data["maps"]["gates"][0][0][6:10] == [0.25, 0.5, 1.0, 0.0]
    expected = [
        round(float(seen.maps["positions"][1, 2, i, j]), 3) for i in range(5) for j in range(i + 1)
    ]
    assert data["maps"]["positions"][0][1] == expected


def test_a_long_input_is_cut_at_the_query():
    length = viewer.LONGEST + 10
    maps = {
        "attention": np.broadcast_to(np.arange(length, dtype=np.float32), (1, 1, length, length))
    }
    seen = Inspection(tuple(map(str, range(length))), maps, length - 5, (0,), (0,), "a", 0.5)
    data = content(viewer.page(seen, "x"))
    assert (data["tokens"][0], data["tokens"][-1], data["query"]) == (
        "6",
        str(length - 5),
        viewer.LONGEST - 1,
    )
    assert data["maps"]["attention"][0][0][:3] == [6, 6, 7]


def test_a_notebook_shows_the_same_page(seen):
    frame = seen._repr_html_()
    inner = html.unescape(re.search(r'srcdoc="(.*?)"', frame, re.DOTALL)[1])
    assert content(inner) == content(viewer.page(seen, "x"))


SCRIPT = """
const texts = selector => all(selector).map(node => node.firstChild.textContent);
const numbers = () => all(".token small").map(node => node.textContent);
found.tokens = texts(".token"); found.first = numbers();
const colours = () => all(".token").map(node => Number((node.style.background.match(/[0-9.]+(?=\\))/) ?? [0])[0]));
found.colours = colours(); found.begins = document.getElementById("says").textContent;
found.heads = texts(".head");
all(".token")[1].dispatchEvent(new Event("mouseenter")); found.moved = numbers();
found.says = document.getElementById("says").textContent;
all(".token")[1].focus();
all(".token")[1].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
found.focused = all(".token").indexOf(document.activeElement);
all(".head")[1].click(); found.head = document.getElementById("head").selectedOptions[0].textContent;
found.pressed = all(".head").map(node => node.getAttribute("aria-pressed"));
document.getElementById("map").value = "attention"; document.getElementById("map").dispatchEvent(new Event("change"));
found.map = document.getElementById("says").textContent.includes("highest attention");
"""


@needs_browser
def test_the_page_opens_on_the_head_that_selects_best(seen, tmp_path):
    seen.maps["gates"][1, 2, 3, :4] = [0.0, 0.0, 1.0, 0.0]
    seen.maps["gates"][1, 0, 3, :4] = 0.5
    script = 'found.head = document.getElementById("head").selectedOptions[0].textContent;'
    assert (
        browse(viewer.write(tmp_path / "report.html", seen, "x"), tmp_path, script)["head"] == "2"
    )


@needs_browser
def test_the_page_works_in_a_browser(seen, tmp_path):
    shown = browse(
        viewer.write(tmp_path / "report.html", seen, "a <title>"),
        tmp_path,
        SCRIPT,
        "--window-size=500,800",
    )
    assert shown["errors"] == []
    assert (shown["loaded"], shown["wide"]) == (0, False)
    assert shown["tokens"] == ["a", "␣", "<b>", "++;", "print"]
    assert shown["first"] == ["1.8", "1.5", "1.0", "0.0", ""]
    assert shown["colours"] == pytest.approx([0.2, 0.4, 0.8, 0, 0])
    assert shown["begins"].startswith(
        "query 3 (++;) predicts a with probability 0.50; layer 1, head 0: highest"
    )
    assert shown["heads"] == ["layer 1, head 0 (selects best)", "layer 1, head 2"]
    assert shown["moved"][2:] == ["", "", ""]
    assert shown["says"].startswith("query 1 (␣); layer 1, head 0: highest gates: ")
    assert (shown["focused"], shown["head"], shown["pressed"]) == (2, "2", ["false", "true"])
    assert shown["map"]
