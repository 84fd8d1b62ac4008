import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer

from cope_jax.evaluation.contextual.contextual_plots import (
    language_model_curves,
    mix_weights,
    scores_by_layer,
)
from cope_jax.evaluation.report.plot_style import NothingToPlot, save

LAYERS = ["words", "layer 1", "layer 2"]
SCORES = {"parts of speech": [[0.90, 0.95, 0.94], [0.92, 0.97, 0.94]], "senses": [[0.6, None, 0.7]]}
BASELINES = {"majority of the word": 0.8616, "most frequent sense": 0.85, "majority": 0.17}
TITLE = "Probes by layer: a title that is too long for one line of a figure of a single column"
CURVES = [
    {
        "model": model,
        "seed": seed,
        "step": step,
        "seconds": step * rate,
        "perplexity": level / (1 + step) ** 0.5 + seed,
    }
    for model, rate, level in (("rnn", 0.1, 900.0), ("lstm", 0.4, 600.0))
    for seed in (0, 2)
    for step in (200, 0, 100, 400)
]


def boxes(figure):
    """Legend with its title, and panels with all that belongs to them, in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    return (
        legend.get_window_extent(renderer),
        [axes.get_tightbbox(renderer) for axes in figure.axes],
        figure.bbox,
    )


FIGURES = {
    "scores": lambda: scores_by_layer(LAYERS, SCORES, BASELINES, title=TITLE),
    "many bars": lambda: mix_weights(
        [f"layer {i}" for i in range(13)], {"a": [[1 / 13] * 13], "b": [[1 / 13] * 13]}
    ),
    "mix": lambda: mix_weights(
        LAYERS, {"tags": [[0.2, 0.5, 0.3], [0.3, 0.4, 0.3]], "senses": [[0.1, 0.2, 0.7]]}
    ),
    "curves": lambda: language_model_curves(CURVES),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_nothing_is_cut_and_the_legend_lies_on_nothing(name):
    legend, panels, whole = boxes(FIGURES[name]())
    for box in (legend, *panels):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
    assert all(not legend.overlaps(panel) for panel in panels)


def test_lines_are_means_with_deviations_and_baselines_have_names_apart():
    (axes,) = scores_by_layer(LAYERS, SCORES, BASELINES).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    np.testing.assert_allclose(lines["parts of speech"], [91, 96, 94])
    np.testing.assert_allclose(lines["senses"], [60, np.nan, 70])
    (bars,) = axes.containers  # of the one that has several runs
    spans = [segment[:, 1] for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(
        spans, [[91 - 2**0.5, 91 + 2**0.5], [96 - 2**0.5, 96 + 2**0.5], [94, 94]]
    )
    levels = sorted(line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":")
    np.testing.assert_allclose(levels, [17, 85, 86.16])
    lowest, highest = axes.get_ylim()
    assert lowest < 17 and highest > 97
    names = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert list(names) == ["majority", "most frequent sense", "majority of the word"]
    assert np.diff(list(names.values())).min() >= 0.07 * (highest - lowest)
    assert [label.get_text() for label in axes.get_xticklabels()] == LAYERS


def test_the_mix_shows_shares_and_the_level_of_equal_ones():
    (axes,) = FIGURES["mix"]().axes
    groups = [group for group in axes.containers if isinstance(group, BarContainer)]
    np.testing.assert_allclose(
        [[b.get_height() for b in g] for g in groups], [[25, 45, 30], [10, 20, 70]]
    )
    (level,) = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert level == pytest.approx(100 / 3) and axes.get_ylabel() == "share of the mix (%)"
    places = np.array([[bar.get_x() + bar.get_width() / 2 for bar in group] for group in groups])
    np.testing.assert_allclose(places.mean(axis=0), [0, 1, 2], atol=1e-12)
    # Of the one with two runs.
    (bars,) = [group for group in axes.containers if not isinstance(group, BarContainer)]
    spans = [segment[:, 1] for segment in bars.lines[2][0].get_segments()]
    half = 50**0.5
    np.testing.assert_allclose(spans, [[25 - half, 25 + half], [45 - half, 45 + half], [30, 30]])
    assert [text.get_text() for text in axes.texts] == [
        "25.0",
        "45.0",
        "30.0",
        "10.0",
        "20.0",
        "70.0",
        "equal",
    ]
    (axes,) = FIGURES["many bars"]().axes
    assert [text.get_text() for text in axes.texts] == ["equal"]  # there is no room for figures


def test_curves_stand_against_steps_and_seconds():
    left, right = FIGURES["curves"]().axes
    for axes, x in ((left, [100, 200, 400]), (right, [10, 20, 40])):
        line = axes.lines[0]
        np.testing.assert_allclose(line.get_xdata(), x)  # without step 0, in order
        np.testing.assert_allclose(
            line.get_ydata(), [900 / 101**0.5 + 1, 900 / 201**0.5 + 1, 900 / 401**0.5 + 1]
        )
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps", "seconds of training")
    assert left.get_ylabel() == "perplexity"


def test_intervals_are_error_bars_and_equal_lines_are_apart():
    scores = {"nearest mean": [[0.5, 0.75, 1.0]], "k nearest": [[0.5, 0.75, 1.0]]}
    intervals = {"k nearest": [(0.25, 0.75), (0.5, 1.0), (0.875, 1.0)]}
    figure = scores_by_layer(LAYERS, scores, {}, intervals, caption="bars: 95 % intervals")
    (axes,) = figure.axes
    (bars,) = axes.containers
    spans = [segment[:, 1] for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(spans, [[25, 75], [50, 100], [87.5, 100]])
    first, second = axes.lines[:2]
    assert np.all(np.subtract(second.get_xdata(), first.get_xdata()) > 0.02)
    assert first.get_linestyle() != second.get_linestyle()
    assert (axes.get_xlabel(), figure.get_supxlabel()) == ("layer", "bars: 95 % intervals")


def test_saved_figures_are_png_of_300_dots_an_inch_and_svg(tmp_path):
    figure = FIGURES["mix"]()
    path = save(figure, tmp_path / "new" / "mix.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == int(300 * figure.get_size_inches()[0])
    svg = path.with_suffix(".svg").read_bytes()
    assert b"<svg" in svg[:1000]
    save(FIGURES["mix"](), path)
    assert path.with_suffix(".svg").read_bytes() == svg


def test_plots_without_data_say_so():
    for plot in (
        lambda: scores_by_layer(LAYERS, {}),
        lambda: mix_weights(LAYERS, {}),
        lambda: language_model_curves([]),
    ):
        with pytest.raises(NothingToPlot):
            plot()
