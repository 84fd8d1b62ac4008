from types import SimpleNamespace

import pytest

from cope_jax import tasks
from cope_jax.evaluation.report.comparison import markdown, print_errors, table
from tests.evaluation.results import TASK, printed, records

ERRORS = {
    "cope": {"in_distribution": [0.0, 0.0], "dense": [0.01, 0.03], "blanks=24": [0.5, 0.5]},
    "cope(gate=value)+rope": {
        "in_distribution": [0.0, 0.0],
        "dense": [1.0, 1.0],
        "sparse": [0.0004, 0.0],
    },
}
PAPER = {"cope": {"in_distribution": "0.0 (0)", "dense": "0.1 (0.2)"}}

GOLDEN = """\
**selective_copy**, sequence error in %, lower is better. 1,000 steps, 2 seeds: mean ± standard deviation.

| encoding | in distribution | dense | sparse | parameters | time |
| --- | ---: | ---: | ---: | ---: | ---: |
| `cope` | 0.0 ± 0.0 | **2.0 ± 1.4** | – | 20,004 | 65 s |
| *the paper* | 0.0 (0) | 0.1 (0.2) | – |  |  |
| `cope(gate=value)+rope` | 0.0 ± 0.0 | 100.0 ± 0.0 | 0.02 ± 0.03 | 20,021 | 65 s |

**selective_copy**, token error in %, lower is better. 1,000 steps, 2 seeds: mean ± standard deviation.

| encoding | in distribution | dense | sparse | parameters | time |
| --- | ---: | ---: | ---: | ---: | ---: |
| `cope` | 0.0 ± 0.0 | **0.2 ± 0.1** | – | 20,004 | 65 s |
| `cope(gate=value)+rope` | 0.0 ± 0.0 | 10.0 ± 0.0 | 0.002 ± 0.003 | 20,021 | 65 s |

Bold: the lowest mean of the column.
"""


def cells(shown, column):
    return [row[column] for row in shown.rows]


def test_markdown_golden():
    assert markdown(TASK, records(ERRORS), list(ERRORS), PAPER) == GOLDEN


def test_errors_of_an_earlier_checkpoint_say_so(capsys):
    evaluation, training = SimpleNamespace(examples=9), SimpleNamespace(steps=1000)
    config = SimpleNamespace(evaluation=evaluation, training=training)
    experiment = SimpleNamespace(task=TASK, label="decoder, cope", config=config)
    measured = [{**row, "metric": "token_error"} for row in records({"cope": {"dense": [0.25]}})]
    for step, words in ((1000, ""), (200, ", step 200 of 1,000")):
        print_errors(experiment, [{**row, "step": step} for row in measured])
        title = capsys.readouterr().out.splitlines()[0]
        assert title == f"selective_copy, decoder, cope, 9 examples a split, seed 0{words}"


def test_rows_keep_the_order_that_was_asked_for():
    shown = table(TASK, records(ERRORS), ["rope", "cope"])
    assert cells(shown, 0) == ["rope", "cope"]
    assert cells(shown, 1) == ["–", "0.0 ± 0.0"]


def test_of_one_seed_no_deviation_is_promised():
    text = markdown(TASK, records({"cope": {"dense": [0.25]}}), ["cope"])
    assert "1,000 steps, 1 seed.\n" in text


def test_a_caption_says_that_encodings_have_different_numbers_of_seeds():
    errors = {"cope": {"dense": [0.1, 0.2, 0.3]}, "rope": {"dense": [0.1]}}
    text = markdown(TASK, records(errors), list(errors))
    assert "1,000 steps, 1 to 3 seeds: mean ± standard deviation; below: median" in text


def test_errors_that_are_all_100_percent_say_where_to_look():
    errors = {name: {split: [1.0] for split in TASK.evaluation_splits} for name in ("cope", "rope")}
    assert "look at the other metrics" in table(TASK, records(errors), list(errors)).caption
    errors["rope"]["dense"] = [0.99]
    assert "look at" not in table(TASK, records(errors), list(errors)).caption


def test_what_is_not_finite_is_said_and_never_the_best():
    errors = {
        "cope": {"dense": [0.01, float("nan")]},
        "rope": {"dense": [0.5, 0.5]},
        "none": {"dense": [1.0, 1.0]},
    }
    shown = table(TASK, records(errors), list(errors))
    assert cells(shown, 2) == ["not finite", "50.0 ± 0.0", "100.0 ± 0.0"] and shown.bold == {(1, 2)}


def test_only_a_column_with_differences_has_a_best():
    shown = table(TASK, records(ERRORS), list(ERRORS))
    assert cells(shown, 1) == ["0.0 ± 0.0", "0.0 ± 0.0"]
    assert cells(shown, 2) == ["2.0 ± 1.4", "100.0 ± 0.0"] and shown.bold == {(0, 2)}


def test_equal_best_cells_are_both_bold():
    errors = {name: {"dense": [value]} for name, value in (("a", 0.0), ("b", 0.5), ("c", 0.0))}
    assert table(TASK, records(errors), list(errors)).bold == {(0, 2), (2, 2)}


def test_many_seeds_show_median_best_and_worst():
    errors = {"cope": {"dense": [0.0, 0.01, 0.05, 0.06, 0.08], "sparse": [1.0] * 5}}
    shown = table(TASK, records(errors), ["cope"])
    assert cells(shown, 2) == ["4.0 ± 3.4\n5.0\n[0.0, 8.0]"]
    assert cells(shown, 3) == ["100.0 ± 0.0"]
    text = " ".join(printed(shown).split())
    assert "[0.0, 8.0]" in text and "below: median [best, worst]" in text  # and not read as markup
    assert "| 4.0 ± 3.4<br>5.0 [0.0, 8.0] |" in markdown(TASK, records(errors), ["cope"])


def test_metric_of_the_terminal_table_can_be_chosen():
    shown = table(TASK, records(ERRORS), ["cope"], metric="token_error")
    assert "token error" in shown.title
    assert cells(shown, 2) == ["0.20 ± 0.14"]


def test_figures_of_the_paper_stand_below_ours():
    shown = table(TASK, records(ERRORS), list(ERRORS), paper=PAPER)
    assert cells(shown, 0) == ["cope", "  the paper", "cope(gate=value)+rope"]
    assert cells(shown, 2)[1] == "0.1 (0.2)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(99.4, "99 s"), (100.0, "1.7 min"), (5999.0, "100.0 min"), (6000.0, "1.7 h")],
)
def test_time(seconds, text):
    rows = [{**record, "wall_seconds": seconds} for record in records(ERRORS)]
    assert cells(table(TASK, rows, ["cope"]), 5) == [text]


def test_time_is_the_mean_over_seeds_however_many_records_each_has():
    rows = records({"cope": {"dense": [0.0, 0.0], "sparse": [0.0]}})  # seeds took 60 s and 70 s
    assert cells(table(TASK, rows, ["cope"]), 5) == ["65 s"]


def test_different_steps_are_said():
    rows = [{**record, "step": 500 * (1 + record["seed"])} for record in records(ERRORS)]
    assert "500 to 1,000 steps, 2 seeds" in markdown(TASK, rows, ["cope"])


def test_a_comparison_that_measured_nothing_yet():
    assert "Nothing measured yet" in markdown(TASK, [], ["cope"])
    assert cells(table(TASK, [], ["cope"]), 1) == ["–"]


def test_four_encodings_and_three_seeds_fit_an_ordinary_terminal():
    errors = {
        name: {split: [0.9, 1.0, 0.8] for split in TASK.evaluation_splits}
        for name in ("cope", "rope", "relative", "sinusoidal")
    }
    text = printed(table(TASK, records(errors), list(errors)), width=80)
    assert "…" not in text
    assert text.count("90.0 ± 10.0") == 12
    assert "sinusoidal" in text


def test_perplexities_have_two_decimals_and_no_per_cent():
    task = tasks.create("text", tokenizer="bytes", length=16)
    figures = {
        "loss": 3.1,
        "perplexity": 23.456,
        "token_perplexity": 23.456,
        "bits_per_byte": 0.98765,
    }
    common = {
        "seed": 0,
        "step": 10,
        "parameters": 9,
        "wall_seconds": 1.0,
        "encoding": "cope",
        "split": "test",
    }
    rows = [{**common, "metric": metric, "value": value} for metric, value in figures.items()]
    text = markdown(task, rows, ["cope"], {"cope": {"test": "23.46"}})
    assert text.startswith("**text**, perplexity, lower is better.")
    assert "| `cope` | – | 23.46 |" in text and "| *the paper* | – | 23.46 |" in text
    assert "**text**, bits per byte" in text and "| `cope` | – | 0.988 |" in text
    assert "token perplexity" not in text  # the same, where tokens are words
