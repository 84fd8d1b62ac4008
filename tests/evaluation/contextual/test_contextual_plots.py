import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer

from cope_jax.evaluation.contextual.contextual_plots import (
    bars_by_layer,
    language_model_curves,
    mix_weights,
    save,
    scores_by_layer,
)
from cope_jax.evaluation.report.plots import NothingToPlot

LAYERS = ["words", "layer 1", "layer 2"]
SCORES = {"parts of speech": [[0.90, 0.95, 0.94], [0.92, 0.97, 0.94]], "senses": [[0.6, None, 0.7]]}
FLOORS = {"majority of the word": 0.8616, "most frequent sense": 0.85, "majority": 0.17}
TITLE = "Probes by layer: a title that is too long for one line of a figure of a single column"
CURVES = [
    {"model": model, "seed": seed, "step": step, "seconds": step * rate, "perplexity": level / (1 + step) ** 0.5 + seed}
    for model, rate, level in (("rnn", 0.1, 900.0), ("lstm", 0.4, 600.0))
    for seed in (0, 2)
    for step in (200, 0, 100, 400)
]


def boxes(figure):
    """Legend with its title, and panels with all that belongs to them, in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    return legend.get_window_extent(renderer), [axes.get_tightbbox(renderer) for axes in figure.axes], figure.bbox


FIGURES = {
    "scores": lambda: scores_by_layer(LAYERS, SCORES, FLOORS, title=TITLE),
    "bars": lambda: bars_by_layer(LAYERS, {"nearest mean": [0.6, 0.7, 0.8], "k nearest": [0.5, None, 1.0]}, FLOORS),
    "many bars": lambda: bars_by_layer([f"layer {i}" for i in range(13)], {"a": [0.5] * 13, "b": [0.6] * 13}),
    "mix": lambda: mix_weights(LAYERS, {"tags": [[0.2, 0.5, 0.3], [0.3, 0.4, 0.3]], "senses": [[0.1, 0.2, 0.7]]}),
    "curves": lambda: language_model_curves(CURVES, title=TITLE),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_nothing_is_cut_and_the_legend_lies_on_nothing(name):
    legend, panels, whole = boxes(FIGURES[name]())
    for box in (legend, *panels):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
    assert all(not legend.overlaps(panel) for panel in panels)


def test_lines_are_means_with_deviations_and_floors_have_names_apart():
    (axes,) = scores_by_layer(LAYERS, SCORES, FLOORS).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(lines["parts of speech"], [91, 96, 94])
    np.testing.assert_allclose(lines["senses"], [60, np.nan, 70])
    (bars,) = axes.containers  # of the one that has several runs
    spans = [segment[:, 1] for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(spans, [[91 - 2**0.5, 91 + 2**0.5], [96 - 2**0.5, 96 + 2**0.5], [94, 94]])
    levels = sorted(line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--")
    np.testing.assert_allclose(levels, [17, 85, 86.16])
    lowest, highest = axes.get_ylim()
    assert lowest < 17 and highest > 97
    names = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert list(names) == ["majority", "most frequent sense", "majority of the word"]
    assert np.diff(list(names.values())).min() >= 0.07 * (highest - lowest)
    assert [label.get_text() for label in axes.get_xticklabels()] == LAYERS


def test_bars_have_their_figures_and_intervals():
    values = {"nearest mean": [0.6, 0.7, 0.8], "k nearest": [0.5, None, 1.0]}
    (axes,) = bars_by_layer(LAYERS, values, intervals={"k nearest": [(0.4, 0.55), None, (0.9, 1.0)]}).axes
    groups = [group for group in axes.containers if isinstance(group, BarContainer)]
    heights = [[bar.get_height() for bar in group] for group in groups]
    np.testing.assert_allclose(heights, [[60, 70, 80], [50, np.nan, 100]])
    assert [text.get_text() for text in axes.texts] == ["60.0", "70.0", "80.0", "50.0", "100.0"]
    places = np.array([[bar.get_x() + bar.get_width() / 2 for bar in group] for group in groups])
    np.testing.assert_allclose(places.mean(axis=0), [0, 1, 2], atol=1e-12)
    errors = [group for group in axes.containers if not isinstance(group, BarContainer)]
    spans = [group.lines[2][0].get_segments()[0][:, 1] for group in errors]
    np.testing.assert_allclose(spans, [[40, 55], [90, 100]])


def test_narrow_bars_have_no_figures():
    (axes,) = FIGURES["many bars"]().axes
    assert not axes.texts


def test_the_mix_shows_shares_and_the_level_of_equal_ones():
    (axes,) = FIGURES["mix"]().axes
    groups = [group for group in axes.containers if isinstance(group, BarContainer)]
    np.testing.assert_allclose([[b.get_height() for b in g] for g in groups], [[25, 45, 30], [10, 20, 70]])
    (level,) = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    assert level == pytest.approx(100 / 3) and axes.get_ylabel() == "share of the mix (%)"


def test_curves_stand_against_steps_and_seconds():
    left, right = FIGURES["curves"]().axes
    for axes, x in ((left, [100, 200, 400]), (right, [10, 20, 40])):
        line = axes.lines[0]
        np.testing.assert_allclose(line.get_xdata(), x)  # without step 0, in order
        np.testing.assert_allclose(line.get_ydata(), [900 / 101**0.5 + 1, 900 / 201**0.5 + 1, 900 / 401**0.5 + 1])
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps", "seconds of training")
    assert left.get_ylabel() == "perplexity"
    only = language_model_curves(CURVES, models=["lstm"]).axes[0].lines
    assert [line.get_label() for line in only] == ["lstm"]


def test_saved_figures_are_png_of_200_dots_an_inch(tmp_path):
    figure = FIGURES["mix"]()
    data = save(figure, tmp_path / "new" / "mix.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == int(200 * figure.get_size_inches()[0])


def test_plots_without_data_say_so():
    for plot in (
        lambda: scores_by_layer(LAYERS, {}),
        lambda: bars_by_layer([], {"a": []}),
        lambda: mix_weights(LAYERS, {}),
        lambda: language_model_curves([{"model": "rnn", "loss": 1.0}]),
    ):
        with pytest.raises(NothingToPlot):
            plot()
