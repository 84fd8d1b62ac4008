import json

import pytest

from cope_jax.training.metrics import MetricsWriter, read_metrics

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
        writer.write([{"step": 1, "seed": 0, "loss": float("nan"), "grad_norm": float("inf"), "update_norm": 0.5}])
    assert read_metrics(writer.path) == [{"step": 1, "seed": 0, "loss": None, "grad_norm": None, "update_norm": 0.5}]
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


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_gets_the_numbers_by_seed_and_split(tmp_path, monkeypatch):
    written = []
    with MetricsWriter(tmp_path, 0) as writer:
        monkeypatch.setattr(writer._board, "add", lambda *scalar: written.append(scalar))
        writer.write([{"step": 4, "seed": 1, "split": "dense", "loss": 0.5, "token_error": 0.25}, *rows(5)])
        writer.board(6, {"speed": 7.0})
    assert written == [
        ("seed_1/dense/loss", 0.5, 4),
        ("seed_1/dense/token_error", 0.25, 4),
        ("seed_0/loss", 0.5, 5),
        ("speed", 7.0, 6),
    ]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_kill_may_cut_a_character_in_two(tmp_path):
    row = {"step": 2, "seed": 0, "split": "größer"}
    whole = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in (*rows(1), row))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole[: whole.index("ö".encode()) + 1])
    assert read_metrics(path) == rows(1)


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
