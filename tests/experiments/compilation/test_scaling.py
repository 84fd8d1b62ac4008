import dataclasses
import json

import pytest

from cope_jax.errors import ConfigError
from experiments.compilation import scaling
from experiments.compilation.scaling import Point


def figures(devices, compute=2.0, sent=5e9, fits=True, chip="v5e"):
    messages = sent / 1e10
    step = [max(compute, messages), compute + messages]
    return {
        "topology": f"{chip}:{devices}x1",
        "devices": devices,
        "fits": fits,
        "batch_size": 2 * devices,
        "bytes": {"peak": 2**30},
        "collectives": [{"sent_bytes": sent / 2}, {"sent_bytes": sent / 2}],
        "compute_seconds": compute,
        "collective_seconds": messages,
        "tokens_per_second": [1000 / s for s in step],
        "mfu": [0.5 / s for s in step],
    }


def write(folder, *all_figures):
    for number, one in enumerate(all_figures):
        (folder / f"{number}.json").write_text(json.dumps(one))


def test_efficiency_is_lost_to_messages_that_do_not_hide():
    point = Point.of(figures(16))
    assert (point.sent_bytes, point.message_seconds) == (5e9, 0.5)
    assert point.efficiency(alone=2.0) == (2.0 / 2.5, 1.0)
    late = dataclasses.replace(point, message_seconds=8.0)
    assert late.efficiency(alone=2.0) == (0.2, 0.25)


def test_points_are_read_by_chip_and_in_order_of_devices(tmp_path):
    write(tmp_path, figures(16), figures(4), figures(4, chip="v5p"))
    found = scaling.read(tmp_path)
    assert {chip: [point.devices for point in own] for chip, own in found.items()} == {"v5e": [4, 16], "v5p": [4]}


def test_what_does_not_fit_is_in_the_table_and_is_not_what_others_are_measured_by(tmp_path):
    write(tmp_path, figures(1, fits=False), figures(4, compute=2.0, sent=0), figures(16, compute=2.0))
    found = scaling.read(tmp_path)
    assert scaling.alone(found["v5e"]) == 2.0
    table = scaling.markdown(found).splitlines()
    assert "does not fit" in table[2]
    assert table[3].endswith("| 100% |")
    assert table[4].endswith("| 80% – 100% |")
    assert len({line.count("|") for line in table}) == 1


def test_the_plot_has_two_lines_for_each_chip(tmp_path):
    write(tmp_path, figures(4), figures(16), figures(4, chip="v5p"))
    axes = scaling.plot(scaling.read(tmp_path)).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["v5e, no message hidden"] == [80.0, 80.0]
    assert lines["v5e, messages hidden"] == [100.0, 100.0]
    assert len(lines) == 4


@pytest.mark.parametrize("text", ["{}", "[]", "no json"])
def test_a_file_that_is_something_else_is_wrong_input(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is not what"):
        scaling.read(tmp_path)


def test_an_empty_folder_and_a_step_that_fits_nowhere_are_wrong_input(tmp_path):
    with pytest.raises(ConfigError, match="compile_check --json"):
        scaling.read(tmp_path)
    write(tmp_path, figures(1, fits=False))
    with pytest.raises(ConfigError, match="fits no number"):
        scaling.alone(scaling.read(tmp_path)["v5e"])
