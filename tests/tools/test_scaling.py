import json

import pytest

from cope_jax.errors import ConfigError
from tools import scaling
from tools.scaling import Point

GIB = 2**30


def figures(devices, compute=2.0, sent=6e9, chip="v5e"):
    return {
        "topology": f"{chip}:{devices}x1",
        "devices": devices,
        "batch_size": 2 * devices,
        "length": 500,
        "hbm_bytes": 16 * GIB,
        "ring_bandwidth": 1e10,
        "peak_flops": 1e12,
        "model_flops": 3e11 * devices,
        "bytes": {"arguments": 4 * GIB, "peak": 5 * GIB},
        "collectives": [{"sent_bytes": sent / 2}, {"sent_bytes": sent / 2}],
        "compute_seconds": compute,
    }


def write(folder, *all_figures):
    for number, content in enumerate(all_figures):
        (folder / f"{number}.json").write_text(json.dumps(content))


def at(devices, **options):
    return Point.of(figures(4, **options), devices, 2.0)


def test_efficiency_is_lost_to_messages_that_do_not_hide():
    point = at(4)
    assert (point.messages, point.steps, point.efficiency) == (0.6, (2.6, 2.0), (2.0 / 2.6, 1.0))
    assert at(4, sent=6e10).efficiency == (2.0 / 8.0, 2.0 / 6.0)


def test_other_numbers_of_devices_follow_by_the_ring_and_by_the_share_of_the_state():
    assert [at(count).sent for count in (1, 2, 4, 8)] == pytest.approx([0, 4e9, 6e9, 7e9])
    assert [at(count).memory / GIB for count in (1, 2, 4, 8)] == [17, 9, 5, 3]
    assert ["not fit" in at(count).cells()[3] for count in (1, 2)] == [True, False]
    assert (at(4).compiled, at(8).compiled) == (True, False)
    assert at(1).efficiency == (1.0, 1.0)


def test_figures_are_read_by_chip(tmp_path):
    write(tmp_path, figures(16), figures(4), figures(4, chip="v5p"), {"devices": 4, "fits": False})
    by_chip = scaling.read(tmp_path)
    assert {chip: [step["devices"] for step in steps] for chip, steps in by_chip.items()} == {
        "v5e": [16, 4],
        "v5p": [4],
    }


def test_what_was_not_compiled_follows_from_the_nearest_that_was():
    filled = scaling.fill([figures(64, compute=2.0), figures(4, compute=1.0)], [2, 8, 32, 64, 256])
    assert [point.devices for point in filled] == [2, 4, 8, 32, 64, 256]
    assert [point.compiled for point in filled] == [False, True, False, False, True, False]
    assert [point.compute for point in filled] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("times", "efficiency"), [((1.0, 2.0), [1, 1, 0.5, 0.5]), ((2.0, 1.0), [1, 0.5, 1, 1])]
)
def test_computing_longer_than_the_best_program_is_lost(times, efficiency):
    points = [figures(n, compute=seconds) for n, seconds in zip((4, 64), times, strict=True)]
    assert [point.efficiency[1] for point in scaling.fill(points, [1, 256])] == efficiency


def test_the_table_has_a_row_for_each_point():
    points = {"v5e": scaling.fill([figures(4)], [1])}
    table = scaling.markdown(points).splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert [line.split("|")[2].strip() for line in table[2:]] == ["1", "4"]
    assert "does not fit" in table[2]
    # By the formula, in two digits: 1000 tokens and 3e11 FLOPs in 2 seconds.
    assert table[2].endswith("| 500 | 15% | 100% |")
    # In 2.6 or 2 seconds.
    assert table[3].endswith("| 385 – 500 | 11.5% – 15.0% | 77% – 100% |")


def test_the_plot_has_two_lines_for_each_chip_and_marks_what_was_compiled():
    points = {chip: scaling.fill([figures(4, chip=chip)], [1, 16]) for chip in ("v5e", "v5p")}
    lines = {line.get_label(): line for line in scaling.plot(points).axes[0].get_lines()}
    assert len(lines) == 4
    shown = lines["v5e, no message hidden"]
    assert list(shown.get_xdata()) == [1, 4, 16]
    assert list(shown.get_ydata())[:2] == pytest.approx([100, 200 / 2.6])
    assert shown.get_markevery() == [1]
    assert list(lines["v5p, messages hidden"].get_ydata()) == [100, 100, 100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bytes": {}, "devices": 2}', r"was not written by tools\.compile_check --json"),
        ("[]", r"x\.json is damaged \(it must contain a JSON object, not a list\): remove it"),
        ("no json", r"x\.json is damaged \([^\n]*\): remove it"),
        (json.dumps(figures(2))[:-40], r"x\.json is damaged \([^\n]*\): remove it"),
        (None, "has no step"),
    ],
)
def test_a_folder_with_something_else_is_wrong_input(tmp_path, text, message):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        scaling.read(tmp_path)


def test_the_command_prints_the_table_and_draws_the_plot(start, tmp_path):
    write(tmp_path, figures(4))
    flags = (f"--figures={tmp_path}", f"--plot={tmp_path / 'plot.png'}", "--devices=1,2")
    done = start("tools.scaling", *flags).wait()
    assert (done.status, done.out.count("\n")) == (0, 5), done.err
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert (
        start("tools.scaling", *flags, "--devices=1,many")
        .wait()
        .error.startswith("--devices takes positive whole")
    )
