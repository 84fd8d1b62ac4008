"""One loader for all that a folder may hold: configs without arrays, parameters without optimizer
state.
"""

import dataclasses
import hashlib
import json
import shutil
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.exchange import elmo_files, formats
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.elmo import Elmo, ElmoConfig
from cope_jax.models.encoder import bert_block
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.load import TRAINED, load, load_run
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.training import config_files
from tests.exchange.exchange_cases import GPT2, LLAMA, tensors, write

pytestmark = pytest.mark.xdist_group("load")  # what its fixture trains is shared

CONFIG = {
    "task": {"options": {"num_tokens": 2, "num_blanks": 2}},
    "model": {"num_layers": 1, "block": {"model_dim": 8}},
    "encodings": {"cope": {"npos_max": 4}},
    "optimizer": {"warmup_steps": 1},
    "training": {
        "steps": 2,
        "batch_size": 4,
        "steps_per_dispatch": 1,
        "evaluate_every": 2,
        "checkpoint_every": 1,
    },
    "evaluation": {"examples": 4, "curve_examples": 4, "sweep_examples": 0, "batch_size": 4},
    "job": {"mesh": {"data": 1}},
}
ELMO = ElmoConfig(filters=((1, 3), (2, 4)), cell_dim=6, projection_dim=4, vocab_size=7)


@pytest.fixture(scope="module")
def experiment():
    return Experiment(config_files.config("quick", encoding="cope", **CONFIG))


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    """The folder of two seeds, and their records."""
    folder = tmp_path_factory.mktemp("load") / "run"
    return folder, experiment.train(folder, [3, 5])


@pytest.fixture
def folders(tmp_path):
    """A folder of each kind that is no run."""
    write(tmp_path / "gpt2", GPT2, tensors(GPT2, np.float32))
    write(tmp_path / "llama", LLAMA, tensors(LLAMA, np.float32))
    config, params = formats.load(tmp_path / "gpt2")
    formats.save(tmp_path / "cope_jax", config, params)
    bert = BertConfig(vocab_size=17, max_length=8, num_layers=1, block=bert_block(8, 2))
    drawn = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Bert(bert, rngs=nnx.Rngs(0)))))()
    formats.save(tmp_path / "bert", bert, drawn, form="bert")
    (tmp_path / "elmo").mkdir()
    elmo_files.save_elmo(
        Elmo(ELMO, rngs=nnx.Rngs(0)),
        tmp_path / "elmo" / "options.json",
        tmp_path / "elmo" / "lm_weights.hdf5",
    )
    return {name: tmp_path / name for name in ("gpt2", "llama", "cope_jax", "bert", "elmo")}


def test_a_run_is_known_without_an_array_and_its_parameters_come_without_moments(run, monkeypatch):
    folder, _ = run
    read, asked = Checkpoints.restore, []
    monkeypatch.setattr(
        Checkpoints,
        "restore",
        lambda self, like, *model, **options: (
            asked.append(like) or read(self, like, *model, **options)
        ),
    )
    loaded = load(folder)
    assert (loaded.kind, loaded.name, loaded.seeds, loaded.step) == ("run", "decoder", (3, 5), 2)
    assert loaded.experiment.encoding == "cope" and loaded.config.num_layers == 1
    assert (
        loaded.task.name == "selective_copy"
        and loaded.codec.decode(loaded.codec.encode("| |")) == "| |"
    )
    assert not asked
    first, second = loaded.params(3), loaded.params(5)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert not np.array_equal(first["embedding"]["embedding"], second["embedding"]["embedding"])
    assert loaded.title(5) == "selective_copy, cope, seed 5, step 2"
    assert [[*like] for like in asked] == [["params"]]
    logits_BLV = loaded.model(5)(np.zeros((1, 4), np.int32))
    assert logits_BLV.shape == (1, 4, loaded.task.vocab_size)


def test_an_experiment_resumes_and_measures_what_it_has_trained(run, experiment):
    folder, records = run
    again = experiment.train(folder, [3, 5])
    for measured in (again, experiment.evaluate(folder)):
        not_compared = {"wall_seconds": 0, "memory_gib": 0}
        assert [row | not_compared for row in measured] == [row | not_compared for row in records]
    assert json.loads((folder / "result.json").read_text())["records"] == again
    other = dataclasses.replace(experiment.config, encoding="rope")
    with pytest.raises(
        ConfigError,
        match=r'is a run with other settings, encoding \("cope", not "rope"\) and 2 more: use the config of',
    ):
        Experiment(other).evaluate(folder)
    with pytest.raises(
        ConfigError, match=r"holds a run with other settings, seeds \(\[3, 5\], not \[3\]\)"
    ):
        experiment.train(folder, [3])


@pytest.mark.parametrize(
    ("hook", "message"),
    [("same_data", "the data differ from the data"), ("same_saved_files", "vocabulary")],
)
def test_a_run_is_not_measured_on_other_data_or_words_than_its_own(
    hook, message, run, experiment, monkeypatch
):
    monkeypatch.setattr(type(experiment.task), hook, lambda *_: False)
    with pytest.raises(ConfigError, match=message):
        experiment.evaluate(run[0])


def test_seeds_of_numpy_and_another_thread_train_alike(run, experiment, tmp_path):
    records = []
    worker = threading.Thread(
        target=lambda: records.extend(experiment.train(tmp_path / "run", np.array([3, 5])))
    )
    worker.start()
    worker.join()
    assert [row["value"] for row in records] == [row["value"] for row in run[1]]


@pytest.mark.parametrize("seeds", [[2**31], [-1], [0, 0], np.array([5, 3, 5]), []])
def test_wrong_seeds_end_before_anything_is_written(seeds, experiment, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^the seeds of Experiment.train must be whole numbers of at least 0, below",
    ) as error:
        experiment.train(tmp_path / "run", seeds)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_every_format_is_known_without_its_tensors(folders):
    models = {
        "gpt2": "decoder",
        "llama": "decoder",
        "cope_jax": "decoder",
        "bert": "bert",
        "elmo": "elmo",
    }
    for kind, folder in folders.items():
        whole = load(folder)
        model = whole.model()
        assert (whole.kind, whole.name, whole.task, whole.step) == (kind, models[kind], None, None)
        assert whole.codec is None and model.config == whole.config
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.hdf5")]:
            path.write_bytes(b"damaged")
        assert load(folder).config == whole.config
        assert load(folder).title().startswith(f"{whole.name} of {folder}")
        with pytest.raises(ConfigError, match="cannot read"):
            load(folder).params()
        with pytest.raises(ConfigError, match="holds one model, not a run: omit the seed"):
            load(folder).params(0)


def test_what_holds_no_model_is_one_line(run, tmp_path):
    with pytest.raises(ConfigError, match=r"^there is no folder nowhere: "):
        load("nowhere")
    with pytest.raises(ConfigError, match=r"test_load.py is no folder: give the folder of a model"):
        load(__file__)
    with pytest.raises(
        ConfigError,
        match=r"^.* holds no model: give a folder with the checkpoints of a run, with config.json",
    ):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no seed 4: choose from 3, 5$"):
        load(run[0]).params(4)
    with pytest.raises(
        ConfigError, match=r"the seed of a run must be int or None, got True of type bool"
    ):
        load(run[0]).params(True)
    with pytest.raises(ConfigError, match=r"holds no training run: "):
        load_run(tmp_path)
    folder = shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    assert load(folder).step is None
    with pytest.raises(ConfigError, match=r"has no checkpoint yet: train it first$"):
        load(folder).params()


@pytest.mark.parametrize(
    ("name", "near"),
    [("runs/nothing", None), ("cuonting", "counting"), ("Shakespear", "shakespeare")],
)
def test_only_a_name_that_is_near_is_suggested(name, near):
    hint = f"did you mean {near}\\? Or train" if near else "train"
    with pytest.raises(ConfigError, match=f"^there is no folder {name}: {hint} a model there"):
        load(name)


@pytest.mark.parametrize("name", ["x" * 300, "counting\n", "a\0b"])
def test_a_name_that_no_folder_can_have_is_one_line(name):
    with pytest.raises(ConfigError, match="there is no folder ") as error:
        load(name)
    assert str(error.value).isprintable()


def test_the_trained_models_of_the_package_are_small_and_solve_their_tasks():
    assert sum(file.stat().st_size for file in TRAINED.rglob("*") if file.is_file()) < 2_000_000
    page = (Path(__file__).parents[2] / "experiments" / "RESULTS.md").read_text()
    for folder in sorted(TRAINED.iterdir()):
        about = json.loads((folder / "run.json").read_text())
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in page
        assert about["environment"]["commit"] in page
    counting = load("counting")
    assert (counting.step, counting.seeds, counting.output) == (
        1500,
        (1,),
        Path("runs/trained/counting"),
    )
    batch = counting.task.dataset("in_distribution", 64)
    logits_of = nnx.jit(lambda model, tokens_BL: model(tokens_BL))
    predicted_BL = np.argmax(logits_of(counting.model(), batch["inputs"]), axis=-1)
    assert batch["weights"][predicted_BL != batch["targets"]].sum() <= 1
    text = load("shakespeare")
    tokens_L = np.concatenate(
        [text.codec.begin, text.codec.encode("ROMEO:\nO, she doth teach the torches")]
    )
    logits_LV = np.float64(logits_of(text.model(), tokens_L[None, :-1])[0])
    exact_L = logits_LV[np.arange(len(logits_LV)), tokens_L[1:]]
    losses_L = np.log(np.exp(logits_LV).sum(axis=-1)) - exact_L
    assert losses_L.mean() < 2  # nats; a byte at random has 5.5


def test_a_copy_without_its_vocabulary_stays_an_error(tmp_path):
    folder = shutil.copytree(TRAINED / "shakespeare", tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    copy = load(folder)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"lacks tokenizer\.json, the tokenizer or vocabulary"
        ):
            _ = copy.task
    (folder / "run.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match=r"run.json is damaged \(it lacks config, seeds, step, seconds\): convert the run again",
    ):
        load(folder)
    about = json.loads((TRAINED / "shakespeare" / "run.json").read_text())
    for wrong, message in (
        ({"step": "x"}, "step must be int, not str"),
        ({"seeds": [-1]}, r"seeds are \[-1\]"),
        ({"step": -1}, r"run.json is damaged \(step is -1\): convert the run again"),
        ({"seconds": -0.5}, r"run.json is damaged \(seconds is -0.5\)"),
    ):
        (folder / "run.json").write_text(json.dumps(about | wrong))
        with pytest.raises(ConfigError, match=message):
            load(folder)


def test_a_folder_of_ones_own_comes_before_a_trained_model_of_the_package(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run[0], tmp_path / "counting")
    assert load("counting").seeds == (3, 5)
