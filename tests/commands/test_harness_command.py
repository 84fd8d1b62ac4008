"""The harness command on the built-in sample; its figures are those of the command `perplexity`."""

import itertools
import json

import numpy as np
import pytest

from cope_jax.runs.load import load_run
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import BLOCK, write_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("harness_command")]
TASK = """
task: sample
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("harness") / "run"
    settings = config_files.experiment(
        "text",
        {"tokenizer": "bytes", "length": 32, "packing": "documents"},
        model={"num_layers": 1, "block": BLOCK},
        encoding="cope(npos_max=8)",
        evaluation={"examples": 40, "batch_size": 8},
        job={"mesh": {"data": 1}},
    )
    write_run(folder, ExperimentConfig.from_mapping(settings.to_dict()), perplexity=9.0)
    return folder


@pytest.fixture(scope="module")
def task_dir(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    task = load_run(run).task
    (entries,) = task.token_streams("test")
    # Without `end`.
    tokens = [entries.tokens[start + 1 : end] for start, end in itertools.pairwise(entries.bounds)]
    (folder / "data.json").write_text(
        "".join(json.dumps({"text": task.decode(text)}) + "\n" for text in tokens)
    )
    (folder / "sample.yaml").write_text(TASK.format(data=folder / "data.json"))
    length = int(np.diff(entries.bounds).max())
    return folder, length


def test_its_bits_per_byte_are_those_of_perplexity(run, task_dir, start):
    folder, length = task_dir
    flags = (f"--model={run}", f"--length={length}", "--tasks=sample", f"--task_dir={folder}")
    done = start("harness", *flags).wait()
    assert done.status == 0, done.err
    content = json.loads((run / "harness.json").read_text())
    (record,) = content["records"]
    assert (record["task"], record["metric"], content["settings"]["length"]) == (
        "sample",
        "bits_per_byte",
        length,
    )
    assert "bits_per_byte" in (run / "harness.md").read_text() and "bits_per_byte" in done.out
    done = start("perplexity", f"--model={run}", f"--length={length}", f"--stride={length}").wait()
    assert done.status == 0, done.err
    (wanted,) = json.loads((run / "perplexity.json").read_text())["records"]
    assert record["value"] == pytest.approx(wanted["bits_per_byte"], rel=1e-6)


def test_wrong_input_is_one_line(run, task_dir, start, tmp_path):
    folder, _ = task_dir
    (tmp_path / "bad.yaml").write_text(
        (folder / "sample.yaml").read_text().replace("{{text}}", "{{text.a.b}}")
    )
    for flags, message in (
        (["--tasks=sampel"], "unknown task 'sampel' in --tasks: did you mean 'sample'?"),
        (["--tasks="], "--tasks is empty"),
        (["--tasks=sample", "--task_dir=nowhere"], "there is no folder nowhere"),
        (
            ["--tasks=sample", f"--task_dir={tmp_path}"],
            "lm_eval cannot measure --tasks=sample (UndefinedError",
        ),
        (["--tasks=sample", "--batch_size=0"], "--batch_size=0"),
        (["--tasks=sample", "--seed=7"], "holds no seed 7"),
    ):
        done = start("harness", f"--model={run}", f"--task_dir={folder}", *flags).wait()
        assert (done.status, message in done.error) == (2, True), done.err
