"""The perplexity of runs on the built-in sample, as `compare` shows it and as the command measures it."""

import json

import pytest

from tests.experiments.pretrained import TEXT_CONFIG

pytestmark = pytest.mark.xdist_group("perplexity_command")


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def compared(start, tmp_path_factory):
    """A comparison with two seeds side by side, and a sweep."""
    folder = tmp_path_factory.mktemp("perplexity")
    options = {"vocab_size": 300, "length": 8, "sweep": (8, 16, 32)}
    model = {"num_layers": 1, "block": {"model_dim": 8, "num_heads": 2}}
    path = folder / "config.py"
    path.write_text(TEXT_CONFIG.format(task="text", options=options, model=model, encoding="cope"))
    flags = ("--encodings=learned", "--seeds=2", "--config.seeds_side_by_side=2")
    sizes = ("--config.evaluation.examples=1000", "--config.evaluation.sweep_examples=1000")
    done = start("compare", f"--config={path}", *flags, *sizes, f"--workdir={folder / 'run'}").wait()
    assert done.status == 0, done.err
    return folder / "run"


@pytest.fixture(scope="module")
def cell(compared):
    (config,) = compared.glob("cells/learned/**/config.json")
    return config.parent


def test_perplexity_is_the_headline_of_a_comparison(compared):
    assert (compared / "table.md").read_text().startswith("**text**, perplexity, lower is better.")
    assert "**text**, bits per byte" in (compared / "table.md").read_text()
    assert (compared / "error_by_length.png").exists()
    records = read(compared / "results.json")["records"]
    assert {r["split"] for r in records if r["metric"] == "perplexity"} == {
        "validation",
        "test",
        "length=8",
        "length=16",
        "length=32",
    }
    rows = (line for path in compared.glob("cells/**/metrics.jsonl") for line in path.read_text().splitlines())
    assert any("perplexity" in json.loads(row) for row in rows)


def test_windows_of_the_run_give_its_figures(compared, cell, start):
    done = start("perplexity", f"--workdir={cell}", "--stride=8", "--lengths=16,8").wait()
    assert done.status == 0, done.err
    own = [r for r in read(cell / "perplexity.json")["records"] if r["length"] == 8]
    assert [row["seed"] for row in own] == [0, 1]
    theirs = read(compared / "results.json")["records"]
    for row in own:
        for metric in ("loss", "perplexity", "token_perplexity", "bits_per_byte"):
            (value,) = [
                r["value"] for r in theirs if (r["seed"], r["split"], r["metric"]) == (row["seed"], "test", metric)
            ]
            assert row[metric] == pytest.approx(value, rel=1e-4), metric
    assert (cell / "loss_by_position.png").exists() and (cell / "perplexity_by_length.png").exists()
    assert "windows of 8" in done.out

    # What is measured is kept; another split is added.
    before = read(cell / "perplexity.json")["records"]
    path = cell / "perplexity.json"
    before[0]["loss"] = 1.25
    path.write_text(json.dumps({"records": before}))
    done = start("perplexity", f"--workdir={cell}", "--stride=8").wait()
    assert done.status == 0, done.err
    assert read(path)["records"] == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split=dev"], "unknown --split 'dev'"),
        (["--stride=9"], "--stride=9 leaves tokens out between windows of 8: lower it"),
        (["--lengths=8,x"], "--lengths has 'x', which is no length: write numbers such as 128,256,512"),
        (["--length=64"], "windows of 64 tokens are longer than a table of its position encoding"),
    ],
)
def test_wrong_input_is_one_line(flags, message, cell, start):
    done = start("perplexity", f"--workdir={cell}", *flags).wait()
    assert done.status == 2
    assert message in done.error
