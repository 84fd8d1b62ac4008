"""Trackers, with modules that stand for the packages of services."""

import sys
import types

import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.metrics import MetricsWriter, read_metrics

pytestmark = pytest.mark.newest


class Service:
    """A service's package, with its calls in lists; `broken` names the function that raises."""

    def __init__(self, broken=""):
        self.runs, self.sent, self.finished, self.broken = [], [], 0, broken

    def reached(self, name):
        if name == self.broken:
            raise OSError("no network,\nno service")

    def log(self, numbers, step):
        self.reached("log")
        self.sent.append((step, numbers))

    def finish(self):
        self.reached("finish")
        self.finished += 1

    def wandb(self):
        def init(project, name, config, dir, id, resume):
            self.reached("init")
            self.runs.append(
                {"project": project, "name": name, "config": config, "dir": dir, "id": id}
            )
            assert resume == "allow"
            return self

        return types.SimpleNamespace(init=init)

    def trackio(self):
        def init(project, name=None, config=None, resume="never"):
            self.runs.append({"project": project, "name": name, "config": config})
            return self

        return types.SimpleNamespace(init=init)


def rows(*steps, seed=0):
    return [{"step": step, "seed": seed, "loss": 0.1 * step} for step in steps]


def test_numbers_of_a_step_are_sent_together(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.wandb())
    curve = {"step": 2, "seed": 0, "split": "dense", "loss": 0.5, "token_error": 0.25}
    with MetricsWriter(tmp_path, 0, config={"encoding": "cope"}, tracker="wandb") as writer:
        writer.write([*rows(1, 2), curve])
        writer.board(2, {"speed": 7.0})
    assert service.sent == [
        (1, {"loss": 0.1}),
        (2, {"loss": 0.2, "dense/loss": 0.5, "dense/token_error": 0.25, "speed": 7.0}),
    ]
    (run,) = service.runs
    assert (run["project"], run["config"], run["dir"]) == (
        "cope_jax",
        {"encoding": "cope"},
        str(tmp_path),
    )
    assert service.finished == 1
    assert read_metrics(tmp_path / "metrics.jsonl") == [*rows(1, 2), curve]
    assert not list(tmp_path.glob("events*"))


def test_a_run_that_resumes_is_the_same_run_of_the_service(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.wandb())
    monkeypatch.setitem(sys.modules, "trackio", service.trackio())
    for step, tracker in ((0, "wandb"), (2, "wandb"), (2, "trackio"), (0, "wandb")):
        with MetricsWriter(tmp_path, step, tracker=tracker):
            pass
    first, second, other, again = service.runs
    assert first == second != again
    # All that this package accepts.
    assert other == {name: first[name] for name in ("project", "name", "config")}


def test_seeds_side_by_side_have_tags_of_their_own(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "trackio", service.trackio())
    with MetricsWriter(tmp_path, 0, [7, 8], tracker="trackio") as writer:
        writer.write(rows(1, seed=7) + rows(1, seed=8))
    assert service.sent == [(1, {"seed_7/loss": 0.1, "seed_8/loss": 0.1})]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_service_that_cannot_be_reached_stops_nothing(broken, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", Service(broken).wandb())
    with MetricsWriter(tmp_path, 0, tracker="wandb") as writer:
        writer.write(rows(1, 2, 3))
    assert read_metrics(tmp_path / "metrics.jsonl") == rows(1, 2, 3)
    warning = "warning: wandb gets no more metrics of this run (no network, no service)\n"
    assert capsys.readouterr().err == warning


def test_an_init_that_accepts_everything_gets_everything(tmp_path, monkeypatch):
    service = Service()
    package = types.SimpleNamespace(init=lambda **options: service.runs.append(options) or service)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with MetricsWriter(tmp_path, 0, tracker="wandb"):
        pass
    assert set(service.runs[0]) == {"project", "name", "config", "dir", "id", "resume"}


@pytest.mark.parametrize("module", [types.SimpleNamespace(init=getattr), types.SimpleNamespace()])
def test_an_init_without_a_signature_stops_nothing(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with MetricsWriter(tmp_path, 0, tracker="wandb") as writer:
        writer.write(rows(1))
    assert read_metrics(tmp_path / "metrics.jsonl") == rows(1)
    assert capsys.readouterr().err.startswith("warning: wandb gets no more metrics of this run (")


@pytest.mark.parametrize("active", [True, False])
def test_a_missing_package_is_one_line(active, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(
        ConfigError, match=r"^job.tracker=trackio needs a package .*: pip install trackio$"
    ):
        MetricsWriter(tmp_path / "run", 0, active=active, tracker="trackio")
    assert not (tmp_path / "run").exists()


def test_no_tracker_writes_metrics_only(tmp_path):
    with MetricsWriter(tmp_path, 0, tracker="none") as writer:
        writer.write(rows(1))
        writer.board(1, {"speed": 7.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
