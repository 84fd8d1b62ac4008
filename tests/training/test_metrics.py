import importlib
import json
import sys
import tracemalloc

import pytest

from cope_jax.errors import ConfigError
from cope_jax.training import metrics
from cope_jax.training.metrics import MetricsWriter, headline, read_curves, read_metrics

pytestmark = pytest.mark.newest


def rows(*steps):
    return [{"step": step, "seed": 0, "loss": 0.1 * step} for step in steps]


def test_rows_are_on_disk_when_write_returns_and_read_back_the_same(tmp_path):
    with MetricsWriter(tmp_path / "new" / "folder", 0) as writer:
        writer.write(rows(1, 2))
        assert read_metrics(writer.path) == rows(1, 2)
        writer.write(rows(3))
    assert read_metrics(writer.path) == rows(1, 2, 3)


def test_a_number_that_is_not_finite_is_null(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(
            [
                {
                    "step": 1,
                    "seed": 0,
                    "loss": float("nan"),
                    "grad_norm": float("inf"),
                    "update_norm": 0.5,
                }
            ]
        )
    assert read_metrics(writer.path) == [
        {"step": 1, "seed": 0, "loss": None, "grad_norm": None, "update_norm": 0.5}
    ]
    assert "NaN" not in writer.path.read_text()


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_going_on_drops_the_rows_after_the_step(tmp_path, step, left):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(rows(1, 2, 3))
    before = writer.path.read_bytes().splitlines()
    with MetricsWriter(tmp_path, step) as writer:
        writer.write(rows(10))
    assert read_metrics(writer.path) == rows(*left, 10)
    assert writer.path.read_bytes().splitlines()[:-1] == before[: len(left)]


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(rows(1, 2))
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[:-9])
    assert read_metrics(writer.path) == rows(1)
    with MetricsWriter(tmp_path, 1) as writer:
        writer.write(rows(2))
    assert writer.path.read_bytes() == whole


@pytest.mark.parametrize(
    ("present", "lost"), [((1, 2, 3, 4), None), ((1, 2), "3 to 4"), ((), "1 to 4")]
)
def test_rows_that_someone_removed_are_missed_once(present, lost, tmp_path, capsys):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(rows(*present))
    with MetricsWriter(tmp_path, 4) as writer:
        writer.write(rows(5))
    line = (
        f"warning: {writer.path} was cut or removed: the rows of steps {lost} are lost; "
        "training resumes after them\n"
    )
    assert capsys.readouterr().err == (line if lost else "")


@pytest.mark.slow
def test_a_long_file_is_read_a_row_at_a_time(tmp_path):
    """Of 20,000 rows, 1.4 MB, only those of evaluations are kept, and none in a resumed run."""
    curve = {"step": 19_999, "seed": 0, "split": "dense", "loss": 0.5}
    text = "".join(json.dumps(row) + "\n" for row in (*rows(*range(1, 20_001)), curve))
    (tmp_path / "metrics.jsonl").write_text(text)
    with MetricsWriter(tmp_path / "other", 0):  # imports what it needs
        tracemalloc.start()
    try:
        assert list(read_curves(tmp_path / "metrics.jsonl")) == [curve]
        with MetricsWriter(tmp_path, 20_000):
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_curves_end_where_a_row_is_damaged(tmp_path):
    curve = json.dumps({"step": 1, "seed": 0, "split": "dense", "loss": 0.5}) + "\n"
    for damaged in (
        '{"step": 2, "loss"',
        "\0" * 30 + "\n",
        "{}",
        "\0" * 30 + '"loss": 1}\n',
        '{"loss": 1}\n',
    ):
        (tmp_path / "metrics.jsonl").write_text(curve + damaged + curve)
        assert list(read_curves(tmp_path / "metrics.jsonl")) == read_metrics(
            tmp_path / "metrics.jsonl"
        )
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_has_the_same_tags_for_all_seeds(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        metrics._Board, "add", lambda board, *scalar: written.append((boards[board], *scalar))
    )
    curve = {"step": 4, "seed": 7, "split": "dense", "loss": 0.5, "token_error": 0.25}
    with MetricsWriter(tmp_path / "one", 0, [7]) as writer:
        boards = {writer._board: "."}
        writer.write([curve])
        writer.board(6, {"speed": 7.0})
    assert written == [
        (".", "dense/loss", 0.5, 4),
        (".", "dense/token_error", 0.25, 4),
        (".", "speed", 7.0, 6),
    ]
    written.clear()
    with MetricsWriter(tmp_path / "two", 0, [7, 8]) as writer:
        boards = {board: seed for seed, board in writer._boards.items()} | {writer._board: "."}
        writer.write([{"step": 5, "seed": seed, "loss": 0.5} for seed in (7, 8)])
        writer.board(6, {"speed": 7.0})
    assert written == [(7, "loss", 0.5, 5), (8, "loss", 0.5, 5), (".", "speed", 7.0, 6)]
    for folder in ("one", "two", "two/seed_7", "two/seed_8"):
        assert len(list((tmp_path / folder).glob("events.out.tfevents.*"))) == 1, folder
    assert not list(tmp_path.glob("one/seed_*"))


def test_tensorboard_shows_the_config_of_a_run_once(tmp_path):
    for step in (0, 4):
        with MetricsWriter(tmp_path / str(step), step, config={"encoding": "cope"}):
            pass
        (events,) = (tmp_path / str(step)).glob("events.out.tfevents.*")
        assert (b'"encoding": "cope"' in events.read_bytes()) == (step == 0)


def test_the_headline_says_what_is_not_finite_or_missing():
    rows = [
        {"seed": 0, "split": "dense", "loss": float("inf")},
        {"seed": 0, "split": "sparse", "loss": 1234.5},
    ]
    assert headline(rows, "loss") == "loss dense inf, sparse 1,234.50"
    assert headline(rows[:1], "perplexity") == "perplexity dense nan"


def test_a_kill_may_cut_a_character_in_two(tmp_path):
    row = {"step": 2, "seed": 0, "split": "größer"}
    whole = b"".join(
        json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in (*rows(1), row)
    )
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole[: whole.index("ö".encode()) + 1])
    assert read_metrics(path) == rows(1)


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "x"}', "[" * 100_000])
def test_a_line_of_another_shape_is_left_out(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_metrics_that_are_a_folder_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*metrics.jsonl \(Is a directory\)"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_line_that_never_reached_the_disk_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for rest in (b"\0" * 40, b"0"):
        path.write_bytes(json.dumps(rows(1)[0]).encode() + b"\n" + rest)
        assert read_metrics(path) == rows(1)


def test_a_writer_that_is_not_active_writes_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", 0, active=False) as writer:
        writer.write(rows(1))
        writer.board(1, {"speed": 7.0})
    assert list(tmp_path.iterdir()) == []


def test_a_hidden_module_is_not_imported_and_can_be_later(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with metrics._hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    module = importlib.import_module("colorsys")
    with metrics._hidden("colorsys"):
        assert importlib.import_module("colorsys") is module
    assert sys.modules["colorsys"] is module
