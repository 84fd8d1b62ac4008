import pytest

from cope_jax import tasks
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import write_run

pytestmark = pytest.mark.xdist_group("inspect")  # what its fixtures train is shared

SEEDS = [3, 4]
CONFIG = ExperimentConfig.from_mapping(
    {
        "task": {"name": "selective_copy", "options": {"num_tokens": 2, "num_blanks": 3}},
        "encoding": "cope+learned",
        "model": {"block": {"model_dim": 8, "num_heads": 2}},
        "job": {"mesh": {"data": 1}},
    }
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two seeds that has taken no step yet."""
    folder = tmp_path_factory.mktemp("inspect") / "run"
    write_run(folder, CONFIG, SEEDS, step=10)
    return folder


@pytest.fixture(scope="module")
def inspect(start):
    return lambda *flags: start("inspect", *flags).wait()


def test_an_example_of_a_split_is_shown_up_to_its_last_answer(workdir, inspect):
    done = inspect(f"--model={workdir}", "--split=dense", "--example=1", "--layer=1")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "selective_copy, cope+learned, seed 3, step 10"
    task = tasks.create(CONFIG.task.name, **CONFIG.task.options)
    batch = task.dataset("dense", 2, CONFIG.training.data_seed)
    assert task.decode(batch["inputs"][1]).split() in [line.split() for line in lines]
    assert "layer 1, head 0" in done.out and "layer 0" not in done.out
    written = sorted(path.name for path in (workdir / "maps").iterdir())
    kinds = ("attention", "gates", "positions", "query")
    assert written == sorted(
        [*(f"{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")), "report.html"]
    )
    assert next(line for line in lines if line.endswith(".png")).endswith("query.png")
    assert lines[2].startswith("selects best: layer 1, head ")
    assert "below the tokens: gates, then positions" in lines  # a pipe has no colours


@pytest.mark.slow
def test_an_input_a_seed_and_a_folder_can_be_chosen(workdir, tmp_path, inspect):
    out = tmp_path / "out"
    done = inspect(
        f"--model={workdir}", "--input=3 _ | 3", "--query=-2", "--seed=4", f"--out={out}"
    )
    assert done.status == 0, done.err
    assert "seed 4, step 10" in done.out and "query 2 (|) predicts" in done.out
    assert len(list(out.glob("*.png"))) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=nowhere"], "there is no folder nowhere"),
        (["--model=couting"], "there is no folder couting: did you mean counting?"),
        (["--input=3 x"], "unknown token of selective_copy 'x'"),
        (["--seed=0"], "choose from 3, 4"),
        (["--model=shakespeare"], "or give a text in --input"),
    ],
    ids=["workdir", "nearly a name", "token", "seed", "corpus"],
)
def test_wrong_input_is_one_line(workdir, inspect, flags, message):
    done = inspect(f"--model={workdir}", *flags)
    assert done.status == 2 and message in done.error
