import numpy as np
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer

from cope_jax import tasks
from cope_jax.evaluation.report.plot_style import COLOURS, MARKERS, NothingToPlot, line, looks
from cope_jax.evaluation.report.plots import (
    error_by_length,
    error_by_split,
    learning_curves,
    write_plots,
)
from tests.evaluation.results import TASK, curves, records

ENCODINGS = ["cope", "cope(gate=separate_key)", "rope"]
ERRORS = {
    name: {
        **{split: [0.2 * number, 0.3 * number, 0.4 * number] for split in TASK.evaluation_splits},
        **{split: [0.2 * number, 0.4 * number] for _, split in TASK.sweep},
    }
    for number, name in enumerate(ENCODINGS)
}
CURVES = {
    name: {
        split: {step: [1.0 / (1 + step), 1.0] for step in (300, 0, 200, 100)}
        for split in TASK.evaluation_splits
    }
    for name in ENCODINGS
}


def means(axes):
    """The lines of encodings: those with a label and a marker."""
    return [line for line in axes.lines if line.get_label() in ENCODINGS]


def test_every_plot_is_written_without_a_word(tmp_path):
    paths, skipped = write_plots(tmp_path / "new", TASK, records(ERRORS), curves(CURVES), ENCODINGS)
    assert [path.name for path in paths] == [
        "error_by_split.png",
        "learning_curves.png",
        "error_by_length.png",
    ]
    assert skipped == []
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    files = {file.name for path in paths for file in (path, path.with_suffix(".svg"))}
    assert {file.name for file in (tmp_path / "new").iterdir()} == files


def test_plots_without_data_are_left_out_with_a_reason(tmp_path):
    only_fixed = {"cope": {"dense": [0.5]}}
    paths, skipped = write_plots(tmp_path, TASK, records(only_fixed), [], ["cope"])
    assert [path.name for path in paths] == ["error_by_split.png"]
    assert [reason.partition(":")[0] for reason in skipped] == [
        "learning_curves.png",
        "error_by_length.png",
    ]
    assert (
        "set training.evaluate_every" in skipped[0]
        and "set evaluation.sweep_examples" in skipped[1]
    )
    assert not (tmp_path / "error_by_length.png").exists()


def test_error_by_split_shows_mean_deviation_and_every_seed():
    (axes,) = error_by_split(TASK, records(ERRORS), ENCODINGS).axes
    lines = means(axes)
    assert [line.get_label() for line in lines] == ENCODINGS
    np.testing.assert_allclose([line.get_ydata() for line in lines], [[0] * 3, [30] * 3, [60] * 3])
    bars = [container for container in axes.containers if isinstance(container, BarContainer)]
    np.testing.assert_allclose(
        [[bar.get_height() for bar in group] for group in bars], [[0] * 3, [30] * 3, [60] * 3]
    )
    # 0, 30 and 60 % with deviations of 0, 10 and 20 %; the first, all zero, needs no bar
    error_bars = [
        container for container in axes.containers if isinstance(container, ErrorbarContainer)
    ]
    spans = [container.lines[2][0].get_segments()[0][:, 1] for container in error_bars]
    np.testing.assert_allclose(spans, [[20, 40], [40, 80]])
    dots = np.concatenate(
        [group.get_offsets() for group in axes.collections if group.get_offsets().shape == (3, 2)]
    )
    assert len(dots) == 3 * 3 * 3
    np.testing.assert_allclose(sorted(set(dots[:, 1].round(6))), [0, 20, 30, 40, 60, 80])
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "in distribution",
        "dense",
        "sparse",
    ]
    assert axes.get_ylabel() == "sequence error (%)"


def test_groups_do_not_overlap():
    (axes,) = error_by_split(TASK, records(ERRORS), ENCODINGS).axes
    places = np.array([line.get_xdata() for line in means(axes)])  # [encoding, split]
    assert np.all(np.diff(places, axis=0) > 0)
    np.testing.assert_allclose(places.mean(axis=0), [0, 1, 2], atol=1e-12)
    assert np.ptp(places, axis=0).max() < 1


def test_a_value_that_is_not_finite_leaves_the_bar_out():
    (axes,) = error_by_split(
        TASK, records({"cope": {"dense": [float("nan")]}, "rope": {"dense": [0.5]}}), ENCODINGS
    ).axes
    assert 50 < axes.get_ylim()[1] < 110


def test_error_bars_stay_between_0_and_100():
    errors = {"cope": {"dense": [0.0, 0.9]}, "rope": {"dense": [1.0, 0.1]}}
    (axes,) = error_by_split(TASK, records(errors), ["cope", "rope"]).axes
    error_bars = [
        container for container in axes.containers if isinstance(container, ErrorbarContainer)
    ]
    ends = np.array([container.lines[2][0].get_segments()[0][:, 1] for container in error_bars])
    np.testing.assert_allclose(ends, [[0, 100], [0, 100]])


def test_error_by_length_follows_the_sweep_and_marks_training():
    (axes,) = error_by_length(TASK, records(ERRORS), ENCODINGS).axes
    values = [value for value, _ in TASK.sweep]
    assert axes.get_xticks().tolist() == values == [16, 24, 32, 48, 64]
    assert axes.get_xlabel() == "blanks"
    lines = means(axes)
    np.testing.assert_allclose([line.get_ydata() for line in lines], [[0] * 5, [30] * 5, [60] * 5])
    # The middle encoding stands on the tick.
    np.testing.assert_allclose(lines[1].get_xdata(), values)
    marks = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in marks] == [[32, 32]]
    assert [text.get_text() for text in axes.texts] == ["training"]


def test_a_point_that_one_encoding_lacks_is_a_gap():
    errors = {"cope": {"blanks=16": [0.5], "blanks=64": [0.5]}, "rope": {"blanks=16": [0.25]}}
    (axes,) = error_by_length(TASK, records(errors), ["cope", "rope", "alibi"]).axes
    assert axes.get_xticks().tolist() == [16, 64]
    lines = [line for line in axes.lines if line.get_label() in errors]
    assert [line.get_ydata().tolist() for line in lines] == [[50, 50], [25]]


def test_learning_curves_have_a_panel_for_each_split_and_a_band_over_seeds():
    figure = learning_curves(TASK, curves(CURVES), ENCODINGS)
    assert [axes.get_title() for axes in figure.axes] == ["in distribution", "dense", "sparse"]
    for axes in figure.axes:
        assert [line.get_label() for line in means(axes)] == ENCODINGS
        line, band = means(axes)[0], axes.collections[0].get_paths()[0].vertices
        assert line.get_xdata().tolist() == [0, 100, 200, 300]
        np.testing.assert_allclose(
            line.get_ydata(), [100, 50 + 50 / 101, 50 + 50 / 201, 50 + 50 / 301]
        )
        np.testing.assert_allclose(band[band[:, 0] == 300, 1].min(), 100 / 301)
        np.testing.assert_allclose(band[band[:, 0] == 300, 1].max(), 100)


def test_an_encoding_looks_the_same_in_every_plot():
    def shown(figure):
        lines = means(figure.axes[0])
        return {line.get_label(): (line.get_color(), line.get_marker()) for line in lines}

    expected = {name: (look["color"], look["marker"]) for name, look in looks(ENCODINGS).items()}
    assert expected["cope"] == (COLOURS[0], MARKERS[0]) and expected["rope"] == (
        COLOURS[1],
        MARKERS[1],
    )
    for order in (ENCODINGS, ENCODINGS[::-1]):
        assert shown(error_by_split(TASK, records(ERRORS), order)) == expected
        assert shown(error_by_length(TASK, records(ERRORS), order)) == expected
        assert shown(learning_curves(TASK, curves(CURVES), order)) == expected
    (axes,) = error_by_length(TASK, records(ERRORS), ENCODINGS).axes
    assert [line.is_dashed() for line in means(axes)] == [False, True, False]


def test_names_decide_colours_as_the_pictures_of_docs_have_them():
    look_of = looks(
        ["learned", "relative", "rope", "cope", "alibi", "fire", "fox", "kerple", "none", "t5"]
    )
    four = [
        (look_of[name]["color"], look_of[name]["marker"])
        for name in ("cope", "rope", "relative", "learned")
    ]
    assert four == list(zip(COLOURS, MARKERS, strict=True))[:4]
    assert len({look["color"] for look in look_of.values()}) == len(look_of)
    assert all(looks([name])[name] == look for name, look in look_of.items())


def test_no_two_lines_of_a_plot_look_alike():
    many = [
        "cope",
        "rope",
        *(f"cope(npos_max={size})" for size in range(60)),
        *(f"rope+cope(slope={n})" for n in "abc"),
    ]
    look_of = looks(many)
    assert list(look_of) == many
    assert len({(look["color"], look["marker"]) for look in look_of.values()}) == len(many)
    assert look_of == {name: looks(many[::-1])[name] for name in many}
    assert (
        look_of["cope"] == looks(["cope"])["cope"]
        and looks(["cope+rope"])["cope+rope"]["color"] == COLOURS[0]
    )
    numbered = [tuple(line(number).values()) for number in range(100)]
    assert len(set(numbered)) == len(numbered)


def test_title_and_caption_say_what_is_shown():
    figure = error_by_split(TASK, records(ERRORS), ENCODINGS, "decoder")
    assert figure.legends[0].get_title().get_text() == "sequence error on selective copy, decoder"
    caption = "1,000 steps; mean of 3 seeds; bars: standard deviation; dots: single seeds"
    assert figure.get_supxlabel().replace("\n", " ") == caption
    single = error_by_split(
        TASK, records({"cope": {"dense": [0.5]}, "rope": {"sparse": [0.5, 0.5]}}), ["cope"]
    )
    assert single.get_supxlabel() == "1,000 steps; 1 seed"
    bands = learning_curves(TASK, curves(CURVES), ENCODINGS).get_supxlabel()
    assert bands == "300 steps; mean of 2 seeds; bands: lowest to highest seed"


@pytest.mark.parametrize("number", [1, 4, 12])
def test_the_legend_names_every_encoding_inside_the_figure(number):
    names = (
        [f"cope(gate=value,npos_max={size})" for size in range(number)]
        if number > 4
        else ENCODINGS[:number]
    )
    errors = {name: {"dense": [0.5]} for name in names}
    figure = error_by_split(TASK, records(errors), names)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
    # Inches left for the data.
    assert figure.axes[0].get_position().height * figure.get_figheight() > 1.2


def test_small_errors_fill_the_axis_and_large_ones_show_all_of_it():
    def top(error):
        return (
            error_by_split(TASK, records({"cope": {"dense": [error]}}), ["cope"]).axes[0].get_ylim()
        )

    assert top(0.02) == (0, pytest.approx(2.2))
    assert top(0.6) == (0, 100)
    assert top(0.0) == (0, pytest.approx(0.1))


def test_nothing_to_plot_says_why():
    with pytest.raises(NothingToPlot, match="sequence_error"):
        error_by_split(TASK, [], ["cope"])


def language_model(values):
    """Records of encoding → length of the context → perplexity."""
    task = tasks.create("text", tokenizer="bytes", length=16, sweep=(16, 32, 64))
    records = [
        {
            "encoding": encoding,
            "split": f"length={length}",
            "metric": "perplexity",
            "value": value,
            "seed": 0,
            "step": 9,
        }
        for encoding, by_length in values.items()
        for length, value in by_length.items()
    ]
    return task, records


def test_lengths_that_double_and_perplexities_that_differ_much_have_logarithmic_axes():
    task, measured = language_model(
        {"cope": {16: 20.0, 32: 18.0, 64: 17.0}, "rope": {16: 21.0, 32: 60.0, 64: 200.0}}
    )
    (axes,) = error_by_length(task, measured, ["cope", "rope"]).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xticks().tolist() == [16, 32, 64]
    assert axes.get_ylabel() == "perplexity"
    assert axes.get_xlabel() == "length of the context"
    assert [text.get_text() for text in axes.texts] == ["training"]
    assert [line.get_ydata().tolist() for line in means(axes)] == [[20, 18, 17], [21, 60, 200]]
    task, measured = language_model({"cope": {16: 20.0, 32: 19.9, 64: float("nan")}})
    (axes,) = error_by_length(task, measured, ["cope"]).axes
    assert axes.get_yscale() == "linear"
    # A small difference looks small.
    assert axes.get_ylim() == pytest.approx((0.95 * 19.95, 1.05 * 19.95))


def test_files_are_named_by_the_metric(tmp_path):
    task, measured = language_model({"cope": {16: 20.0, 32: 18.0, 64: 17.0}})
    paths, _ = write_plots(tmp_path, task, measured, [], ["cope"])
    assert [path.name for path in paths] == ["perplexity_by_length.png"]


def test_curves_of_before_a_measure_are_left_out():
    rows = [row for row in curves(CURVES) if row["encoding"] == "cope"]
    for row in rows:
        del row["sequence_error"]
    with pytest.raises(NothingToPlot, match="no learning curve has sequence_error"):
        learning_curves(TASK, rows, ["cope"])
