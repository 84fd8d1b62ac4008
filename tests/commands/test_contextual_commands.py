import json
import re

import jax
import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.cli.flag_values import by_kind, load_models
from cope_jax.corpora import sentences_by_corpus
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import nearest_words, pretrained
from cope_jax.generation.decoding import generate
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.cell import Cell
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.load import load
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import MODELS

pytestmark = pytest.mark.xdist_group("contextual_commands")  # what its fixtures train is shared


def read(path):
    return json.loads(path.read_text())


def test_neighbours_are_those_of_the_vectors(trained, start, tmp_path):
    sentences = "the Spring was late and cold|a spring of steel"
    done = start(
        "neighbours",
        f"--models={trained / 'rnn'},{trained / 'elmo'}",
        "--word=spring",
        f"--sentences={sentences}",
        "--count=3",
        f"--workdir={tmp_path}",
    ).wait()
    assert done.status == 0, done.err
    content = read(tmp_path / "neighbours.json")
    assert [query["place"] for query in content["sentences"]] == [1, 1]
    assert len(content["static"]) == 3 and "spring" not in {
        near["word"] for near in content["static"]
    }
    assert {
        name: list(near_of["of any word"][0]) for name, near_of in content["models"].items()
    } == {
        "RNN": ["embeddings", "layer 1"],
        "ELMo": ["words", "layer 1", "layer 2"],
    }
    corpus = [
        sentence
        for text in sentences_by_corpus.documents("wikitext-2", None, "train")
        for sentence in text
    ]
    assert content["corpus"] == {"sentences": len(corpus), "words": sum(map(len, corpus))}
    rnn = pretrained.load(str(trained / "rnn"))
    index = nearest_words.OccurrenceIndex(rnn, corpus)
    for way, words, per_word in (("of the word", "same", None), ("of any word", "any", 1)):
        for query, near_of in zip(sentences.split("|"), content["models"]["RNN"][way], strict=True):
            for layer, near in index.nearest(
                query.split(), 1, count=3, words=words, per_word=per_word
            ).items():
                assert [(" ".join(n.sentence), n.place) for n in near] == [
                    (n["sentence"], n["place"]) for n in near_of[layer]
                ]
                np.testing.assert_allclose(
                    [n.cosine for n in near], [n["cosine"] for n in near_of[layer]], atol=1e-3
                )
    assert {near["word"] for near in content["models"]["ELMo"]["of the word"][1]["layer 2"]} <= {
        "spring",
        "Spring",
    }
    table = (tmp_path / "neighbours.md").read_text()
    assert "## RNN: occurrences of the word" in table and "a *spring* of steel" in table
    # The last of each model.
    assert "| layer 2 |" in table and "| layer 1 |" in table and "| words |" not in table
    assert str(tmp_path / "neighbours.md") in done.out.splitlines()


@pytest.mark.slow
def test_senses_are_told_beside_what_knows_no_context(trained, start, tmp_path):
    done = start(
        "neighbours",
        "--task=senses",
        f"--models={trained / 'bert'}",
        "--k=3",
        f"--workdir={tmp_path}",
    ).wait()
    assert done.status == 0, done.err
    content = read(tmp_path / "senses.json")
    rows = {(row["model"], row["layer"], row["method"]): row for row in content["scores"]}
    assert len(rows) == 1 + 2 * (2 + 3) and (content["train"], content["test"]) == (16, 8)
    # A vector that is the same in every sentence cannot tell senses that are equally frequent.
    for key in (("no vectors", "", "most frequent"), ("word2vec, word", "static", "nearest mean")):
        assert rows[key]["micro"] == 0.5
    for row in rows.values():
        assert row["micro"] == sum(row["right"].values()) / 8
        assert row["micro_interval"][0] <= row["micro"] <= row["micro_interval"][1]
    best = rows["BERT", "layer 2", "k nearest"]
    assert (
        f"| BERT | layer 2 | k nearest | {100 * best['micro']:.1f} ["
        in (tmp_path / "senses.md").read_text()
    )
    assert (tmp_path / "senses_BERT.png").stat().st_size > 10_000


@pytest.mark.slow
def test_probes_say_what_each_layer_knows(trained, start, tmp_path):
    done = start(
        "probe",
        f"--models={trained / 'elmo'}",
        "--epochs=100",
        "--test_words=30",
        f"--workdir={tmp_path}",
    ).wait()
    assert done.status == 0, done.err
    content = read(tmp_path / "probe.json")
    assert set(content["models"]["ELMo"]) == {"parts of speech", "word senses"}
    assert content["tested"]["word senses"] == 8 and content["tested"]["parts of speech"] <= 30
    for task, probe in content["models"]["ELMo"].items():
        assert [score["layer"] for score in probe["scores"]] == ["words", "layer 1", "layer 2"]
        assert sum(probe["mix"]) == pytest.approx(1) and 0 <= probe["centre_of_gravity"] <= 2
        assert probe["candidates"] == sorted(
            probe["candidates"], key=["words", "layer 1", "layer 2"].index
        )
        for score in probe["scores"]:
            assert score["interval"][0] < score["accuracy"] < score["interval"][1] or score[
                "accuracy"
            ] in (0, 1)
            assert score["accuracy"] * content["tested"][task] == pytest.approx(
                round(score["accuracy"] * content["tested"][task]), abs=1e-4
            )
    # A vector of the word's characters alone, whatever is around it, cannot tell its senses but by
    # chance.
    senses_of_words = content["models"]["ELMo"]["word senses"]
    assert senses_of_words["floors"] == {"majority": 0.25, "majority of the word": 0.5}
    assert senses_of_words["scores"][0]["accuracy"] == 0.5
    assert (
        content["paragraph"] in " ".join(done.out.split())
        and "lower layers know syntax" in content["paragraph"]
    )
    for name in ("probe_ELMo.png", "mix_ELMo.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert "| none: majority of the word | 50.0 |" in (tmp_path / "probe.md").read_text()


def test_floors_of_masked_words_are_measured_on_the_runs_examples(trained, start):
    done = start("floors", f"--model={trained / 'bert'}", "--examples=300").wait()
    assert done.status == 0, done.err
    content = read(trained / "bert" / "floors.json")
    records = read(trained / "bert" / "result.json")["records"]
    run = {(r["split"], r["metric"]): r["value"] for r in records}
    floors = {(row["split"], row["name"]): row for row in content["floors"]}
    task = tasks.create("masked_lm", **MODELS["bert"][1])
    for split in ("validation", "test"):
        assert floors[split, "most frequent piece"]["value"] == task.unigram_accuracy(split)
        assert floors[split, "most frequent piece"]["run"] == pytest.approx(
            1 - run[split, "mlm_error"]
        )
        following = task.dataset(split, 40)["next"]
        more = np.bincount(task.dataset("train", 300)["next"]).argmax()
        assert floors[split, "more frequent answer"]["value"] == pytest.approx(
            np.mean(following == more)
        )
        words = floors[split, "bag of words"]
        assert (
            words["run"] == pytest.approx(1 - run[split, "nsp_error"]) and 0.3 < words["value"] <= 1
        )
    assert (
        content["run"] == "result.json"
        and "bag of words" in (trained / "bert" / "floors.md").read_text()
    )


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (
            "neighbours",
            ["--models=minilm", "--word=play", "--sentences=they win"],
            "has no word 'play': put spaces",
        ),
        (
            "neighbours",
            ["--models=minilm"],
            "--task=neighbours needs --word and --sentences: see --help",
        ),
        (
            "neighbours",
            ["--models=nowhere", "--task=senses"],
            "there is no folder nowhere: train a model there",
        ),
        (
            "neighbours",
            ["--models=RUN", "--word=qqq", "--sentences=a qqq"],
            "the corpus has no word 'qqq'",
        ),
        (
            "neighbours",
            ["--models=RUN", "--task=senses", "--corpora_dir=nowhere"],
            "no coarsewsd20/coarsewsd20.tsv in nowhere",
        ),
        ("probe", [], "missing --models; see --help"),
        (
            "probe",
            ["--models=RUN", "--corpora_dir=nowhere"],
            "no ud-ewt/en_ewt-ud-train.conllu in nowhere",
        ),
        ("floors", [], "there is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_line(command, given, message, trained, start, tmp_path):
    given = [re.sub("RUN", str(trained / "rnn"), flag) for flag in given]
    folder = "model" if command == "floors" else "workdir"
    done = start(command, *given, f"--{folder}={tmp_path / 'new'}").wait()
    assert done.status == 2, done.err
    assert message in done.error
    assert not (tmp_path / "new").exists()


def test_models_are_named_once_and_known_by_their_kinds(trained):
    elmo, bert, rnn = (str(trained / name) for name in ("elmo", "bert", "rnn"))
    assert by_kind([bert, elmo], ("elmo", "bert")) == {"bert": bert, "elmo": elmo}
    assert [model.name for model in load_models([rnn, f"{trained}/../{trained.name}/rnn"])] == [
        f"RNN {trained.name}/rnn"
    ] * 2
    for wrong, message in (
        ([], "--models names no model"),
        ([rnn, rnn], "twice: name each model once"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_models(wrong)
    with pytest.raises(ConfigError, match="rnn, which contains a rnn_lm: give only elmo and bert"):
        by_kind([rnn], ("elmo", "bert"))
    with pytest.raises(ConfigError, match="names two models of bert"):
        by_kind([bert, bert], ("elmo", "bert"))


def test_floors_are_known_of_some_tasks(start, config, tmp_path):
    workdirs.Workdir(tmp_path).open(
        ExperimentConfig.from_mapping({"task": {"name": "flip_flop", "options": {}}}), [0]
    )
    (tmp_path / "checkpoints").mkdir()
    done = start("floors", f"--model={tmp_path}").wait()
    assert done.status == 2, done.err
    assert (
        "is a run on flip_flop: choose a run on a task with baselines: bilm, masked_lm, tagging, words"
        in done.error
    )


def test_perplexity_is_measured_of_decoders_on_text(start, trained):
    done = start("perplexity", f"--model={trained / 'rnn'}").wait()
    assert done.status == 2, done.err
    assert (
        done.error
        == f"{trained / 'rnn'} is a run of rnn_lm on words: choose a decoder trained on text"
    )


def test_a_recurrent_model_generates_text(start, trained):
    flags = ("--prompt=the", "--max_new_tokens=5", "--top_k=1")
    done = start("generate", f"--model={trained / 'rnn'}", *flags).wait()
    assert done.status == 0, done.err
    run = load(trained / "rnn")
    prompt = [*run.codec.begin, *run.codec.read("the", "--prompt").tolist()]
    (row,) = generate(run.model(), [prompt], 5, key=jax.random.key(0), temperature=0)
    assert len(row) == 5
    assert done.out.split() == ["the", *run.codec.decode(row).split()]


def test_own_tables_are_classified_and_tagged(start, tmp_path):
    (tmp_path / "films.csv").write_text(
        "text,label\n" + "".join(f"good {n},yes\nbad {n},no\n" for n in range(20))
    )
    (tmp_path / "tags.csv").write_text(
        "text,label\n" + "".join(f"dogs {n} run,N M N\n" for n in range(60))
    )
    flags = ("--systems=majority", f"--workdir={tmp_path}")
    done = start("classify", f"--input={tmp_path}/films.csv", *flags).wait()
    assert (
        done.status == 0
        and "| yes caught % | no blocked % |" in (tmp_path / "table.md").read_text()
    ), done.err
    done = start("tag", f"--input={tmp_path}/tags.csv", *flags).wait()
    assert done.status == 0 and re.search(
        r"majority .*66.67", (tmp_path / "table.md").read_text()
    ), done.err


def test_cells_of_a_table_that_has_changed_are_not_shown(tmp_path):
    table = tmp_path / "films.csv"
    rows = [f"good {n},yes\nbad {n},no\n" for n in range(20)]
    table.write_text("text,label\n" + "".join(rows[:-1]))
    config = ExperimentConfig.from_mapping(
        {"task": {"name": "spam", "options": {"file": str(table)}}}
    )
    grid = Grid(tmp_path / "runs", [Cell(config, (0,))])
    folder = grid.cells[0].folder(grid.workdir)
    workdirs.Workdir(folder).open(config, [0])
    workdirs.Workdir(folder).keep_files(config.task.create())
    (folder / "result.json").write_text("{}")
    pretrained.check_sources(grid)
    table.write_text("text,label\n" + "".join(rows))
    with pytest.raises(ConfigError, match="the data differ from the data of the run in"):
        pretrained.check_sources(grid)
    (folder / "result.json").unlink()  # then training says so
    pretrained.check_sources(grid)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--corpus=files", "--text_field=x"), "--text_field belongs to --input: leave it out"),
        (("--corpus=files", "--held_out=0.3"), "--held_out belongs to --input: leave it out"),
        (("--input=a.txt", "--globs=x"), "--globs belongs to --corpus: leave it out"),
        (("--input=a.txt", "--options=x=1"), "--options belongs to --task: leave it out"),
        (("--task=quick", "--vocab=x"), "--vocab belongs to --input and --corpus: leave it out"),
        (
            ("--input=a.txt", "--vocab=x", "--vocab_size=9"),
            "--vocab_size is for a vocabulary that is learned: leave it out",
        ),
        (
            ("--input=a.txt", "--tokenizer=bytes", "--sample=9"),
            "--sample is for a vocabulary that is learned: leave it out",
        ),
        (("--input=a.txt", "--input=b.txt"), "--input is there twice: give it once, with a comma"),
    ],
)
def test_flags_of_an_export_without_effect_are_one_line(start, flags, line, tmp_path):
    done = start("export", *flags, f"--out={tmp_path / 'out'}").wait()
    assert done.status == 2 and line in done.error, done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [False, True])
def test_an_export_says_that_it_reads_the_small_sample(given, start, tmp_path):
    flags = ("--corpus=wikitext-2", "--tokenizer=bytes", "--length=8", "--workers=1")
    sample = (f"--corpora_dir={tmp_path / 'none'}",) if given else ()
    done = start("export", *flags, *sample, f"--out={tmp_path / 'out'}").wait()
    line = "wikitext-2: the small built-in sample, because --corpora_dir is not set\n"
    assert (done.status, line in done.out) == ((2, False) if given else (0, True)), done.err
