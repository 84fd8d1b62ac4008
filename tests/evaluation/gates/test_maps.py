import dataclasses
import functools
import io

import numpy as np
import pytest
from flax import nnx
from rich.color import ColorSystem
from rich.console import Console

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import maps
from cope_jax.models.decoder import Decoder, DecoderConfig

VOCABULARY = ("pass;", "a", "++;", "print")
TOKENS = np.array([1, 2, 0, 0, 3, 1], np.int32)


@functools.cache
def model(encoding="cope"):
    config = DecoderConfig(vocab_size=4, max_length=80, encoding=EncodingConfig.parse(encoding))
    return nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def seen():
    return maps.inspect(model(), VOCABULARY, TOKENS)


def known(gates_NHLL):
    """The inspection of some gates, of the last query."""
    layers, heads, length, _ = gates_NHLL.shape
    arrays = {
        "gates": gates_NHLL,
        "positions": np.cumsum(gates_NHLL[..., ::-1], axis=-1)[..., ::-1],
    }
    tokens = tuple(VOCABULARY[token] for token in np.resize(TOKENS, length))
    return maps.Inspection(tokens, arrays, length - 1, range(layers), range(heads), "a", 0.5)


def plain(text, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(text, soft_wrap=True)
    return console.file.getvalue()


def test_maps_are_those_of_the_model(seen):
    decoder = model()
    assert seen.tokens == ("a", "++;", "pass;", "pass;", "print", "a")
    assert set(seen.maps) == {"attention", "gates", "positions"}
    for name, values in decoder.maps(TOKENS[None]).items():
        np.testing.assert_array_equal(seen.maps[name], values[:, 0])
    logits_V = np.asarray(decoder(TOKENS[None])[0, -1], np.float64)
    assert seen.predicted == VOCABULARY[int(np.argmax(logits_V))]
    assert seen.probability == pytest.approx(
        np.exp(logits_V.max()) / np.exp(logits_V).sum(), rel=1e-5
    )


def test_positions_are_handed_on():
    at_0 = maps.inspect(model("learned"), VOCABULARY, TOKENS)
    at_9 = maps.inspect(
        model("learned"), VOCABULARY, TOKENS, positions_BL=np.arange(9, 15, dtype=np.int32)[None]
    )
    assert not np.allclose(at_0.maps["attention"], at_9.maps["attention"])
    assert at_0.probability != at_9.probability


def test_query_counts_from_both_ends_and_the_future_does_not_matter():
    whole = maps.inspect(model(), VOCABULARY, TOKENS, query=-3)
    cut = maps.inspect(model(), VOCABULARY, TOKENS[:4])
    assert whole.query == cut.query == 3
    assert whole.probability == pytest.approx(cut.probability, rel=1e-5)
    assert plain(maps.strips(whole, 100)) == plain(maps.strips(cut, 100))


@pytest.mark.slow
def test_the_farthest_query_is_the_first_token():
    assert maps.inspect(model("none"), VOCABULARY, TOKENS, query=-6).query == 0


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"query": 6}, "query must be between -6 and 5 for 6 tokens, got 6"),
        ({"query": -7}, "query must be between -6 and 5 for 6 tokens, got -7"),
        ({"layer": 2}, "layer must be between 0 and 1, got 2"),
        ({"head": -1}, "head must be between 0 and 1, got -1"),
    ],
)
def test_a_place_that_does_not_exist_is_one_clear_line(choice, message):
    with pytest.raises(ConfigError) as error:
        maps.inspect(model(), VOCABULARY, TOKENS, **choice)
    assert str(error.value) == message


def test_a_model_without_attention_is_one_clear_line():
    with pytest.raises(ConfigError, match="model with attention, got a Linear: choose a run of"):
        maps.inspect(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), VOCABULARY, TOKENS)


@pytest.mark.parametrize("query", [0, -1])
def test_a_query_without_any_weight_has_white_strips(query):
    seen = maps.inspect(model("stick_breaking"), VOCABULARY, TOKENS, query=query)
    empty = {name: np.zeros_like(values) for name, values in seen.maps.items()}
    text = maps.strips(dataclasses.replace(seen, maps=empty), 100)
    assert {str(span.style) for span in text.spans if "on #" in str(span.style)} >= {
        "#000000 on #ffffff"
    }


def test_gates_that_step_back_have_colours_of_their_own():
    shades = [str(maps.shade_style(shade)) for shade in (-1, -0.5, 0, 0.5, 1)]
    assert len({*shades}) == 5 and shades[2] == "#000000 on #ffffff"
    seen = maps.inspect(model("cope_signed(npos_max=4)"), VOCABULARY, TOKENS)
    assert seen.maps["gates"].min() < 0 and " -1 " in plain(maps.strips(seen, 100))
    low, high = maps.query_plot(seen).axes[0].get_ylim()
    assert low < 0 < high


def test_strips_show_gates_with_positions_below(seen):
    text = plain(maps.strips(seen, 100))
    for layer in range(2):
        for head in range(2):
            assert f"layer {layer}, head {head}  mean gates: " in text
    assert "; below the tokens: positions" in text
    positions_M = seen.maps["positions"][1, 1, 5]
    assert text.splitlines()[-1].split() == [f"{position:.1f}" for position in positions_M]
    assert text.splitlines()[-2].split() == list(seen.tokens)
    without_colours = plain(maps.strips(seen, 100, coloured=False))
    assert "\nbelow the tokens: gates, then positions\n" in without_colours
    tokens, gates, positions = (line.split() for line in without_colours.splitlines()[-3:])
    assert gates == [f"{gate:.2f}" for gate in seen.maps["gates"][1, 1, 5]]
    assert tokens == list(seen.tokens) and positions == text.splitlines()[-1].split()


@pytest.mark.parametrize(
    "encoding",
    ["none", *(pytest.param(e, marks=pytest.mark.slow) for e in ("rope", "learned+alibi"))],
)
def test_an_encoding_without_gates_shows_its_attention(encoding, tmp_path):
    seen = maps.inspect(model(encoding), VOCABULARY, TOKENS, layer=0, head=1)
    text = plain(maps.strips(seen, 100))
    assert text.count("mean attention: ") == 1 and "layer 0, head 1" in text
    assert "positions" not in text
    assert (
        "attention, relative to the strongest:" in text and "to the attention, all others" in text
    )
    assert text.splitlines()[-1].split() == list(seen.tokens)
    assert [path.name for path in maps.write_heat_maps(tmp_path, seen)] == [
        "query.png",
        "attention.png",
    ]


def test_a_strip_breaks_between_tokens_and_shades_them():
    numbers = [["12.2", "1.0", "0.5"]]
    strip = maps.strip(["pass;", "a", "++;"], np.array([0.0, 1.0, 0.5]), numbers, width=10)
    assert [line.rstrip() for line in strip.plain.splitlines()] == [
        "pass; a",
        "12.2  1.0",
        "++;",
        "0.5",
    ]
    backgrounds = {strip.plain[span.start : span.end].strip(): span.style for span in strip.spans}
    light = {token: sum(backgrounds[token].bgcolor.triplet) for token in ("pass;", "a", "++;")}
    assert light["pass;"] > light["++;"] > light["a"]


def test_heat_map_shows_the_chosen_panels_and_hides_the_future(seen):
    figure = maps.heat_map(dataclasses.replace(seen, heads=[1]), "gates")
    panels = [axes for axes in figure.axes if axes.images and axes.get_title()]
    assert [axes.patches[0].get_y() for axes in panels] == [4.5, 4.5]  # the row of the query
    assert [axes.get_title() for axes in panels] == ["layer 0, head 1", "layer 1, head 1"]
    for layer, axes in enumerate(panels):
        shown = np.ma.filled(axes.images[0].get_array(), np.nan)
        np.testing.assert_array_equal(np.isnan(shown), np.triu(np.ones((6, 6), bool), 1))
        rows, columns = np.tril_indices(6)
        np.testing.assert_array_equal(
            shown[rows, columns], seen.maps["gates"][layer, 1, rows, columns]
        )
        assert [label.get_text() for label in axes.get_yticklabels()] == list(seen.tokens)


@pytest.mark.parametrize(("length", "labelled"), [(70, True), (73, False)])
def test_tokens_label_the_axes_while_they_can_be_read(length, labelled):
    seen = known(np.zeros((1, 1, length, length)))
    labels = [label.get_text() for label in maps.heat_map(seen, "gates").axes[0].get_xticklabels()]
    assert (labels == list(seen.tokens)) == labelled


def test_heat_maps_are_written_one_for_each_map(seen, tmp_path):
    paths = maps.write_heat_maps(tmp_path / "new", seen)
    assert sorted(path.name for path in paths) == [
        "attention.png",
        "gates.png",
        "positions.png",
        "query.png",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_eight_heads_are_four_side_by_side_and_fit_80_columns():
    seen = known(np.random.default_rng(0).uniform(size=(2, 8, 30, 30)))
    panels = [
        axes for axes in maps.heat_map(seen, "gates").axes if axes.images and axes.get_title()
    ]
    assert [axes.get_title() for axes in panels] == [
        f"layer {n}, head {h}" for n in range(2) for h in range(8)
    ]
    assert panels[0].get_subplotspec().get_gridspec().get_geometry() == (4, 4)
    assert max(map(len, plain(maps.strips(seen, 80)).splitlines())) <= 80


def test_the_picture_of_a_query_shows_the_head_that_selects_best():
    gates = np.full((1, 2, 6, 6), 0.5, np.float32)
    gates[0, 1, 5] = [0, 0.25, 0.75, 1, 0, 0]  # "pass;" is token 2 and 3
    seen = known(gates)
    best = maps.best_selection(seen)
    assert (best.head, best.tokens) == (1, {"pass;"}) and best.score == pytest.approx(
        0.875 - 0.0625
    )
    assert (
        best.says
        == "layer 0, head 1: 2 of 6 tokens, 'pass;', add 1.75 to the positions, all others 0.25"
    )
    assert f"selects best: {best.says}" in plain(maps.strips(seen, 100))
    figure = maps.query_plot(seen, "counting, cope")
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0, 0.25, 0.75, 1, 0, 0]
    assert [bar.get_facecolor() == axes.patches[2].get_facecolor() for bar in axes.patches] == [
        0,
        0,
        1,
        1,
        0,
        0,
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(seen.tokens)
    assert [text.get_text() for text in axes.texts] == [
        "position",
        "2.0",
        "2.0",
        "1.8",
        "1.0",
        "0.0",
        "0.0",
    ]
    assert figure.get_suptitle().startswith("counting, cope\nquery 5 'a' (bold)") and " ".join(
        figure.get_suptitle().split()
    ).endswith(best.says)


def test_a_selection_that_fewer_names_describe_is_clearer():
    gates = np.zeros((1, 3, 6, 6), np.float32)
    tokens = known(gates).tokens
    first, second = sorted(set(tokens))[:2]
    gates[0, 0, 5] = [0.95 * (token == first) for token in tokens]
    gates[0, 1, 5] = [0.97 * (token in (first, second)) for token in tokens]
    assert maps.best_selection(known(gates)).head == 0
    gates[0, 2, 5] = [0.96 * (token != first) for token in tokens]
    best = maps.best_selection(known(gates))
    assert best.head == 2 and f"tokens, all but {first!r}, add" in best.says


def test_terminals_of_256_colours_show_the_same_shades():
    styles = [maps.shade_style(shade) for shade in np.linspace(0, 1, 8)]
    for style in styles:
        for colour in (style.color, style.bgcolor):
            assert colour.downgrade(ColorSystem.EIGHT_BIT).get_truecolor() == colour.get_truecolor()
    light = [np.dot(style.bgcolor.triplet, (0.2126, 0.7152, 0.0722)) for style in styles]
    assert np.all(np.diff(light) < -8)
