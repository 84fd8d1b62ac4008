import doctest
import json
import re

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import sentences_by_corpus, unigrams, wikitext
from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import baselines, nearest_words, pretrained, probe_report, sense_data
from cope_jax.evaluation.contextual.probing import LayerScore, Probing
from cope_jax.runs import workdir as workdirs
from cope_jax.training.config import ExperimentConfig
from tests.experiments.pretrained import MODELS

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
    found = read(tmp_path / "neighbours.json")
    assert [query["place"] for query in found["sentences"]] == [1, 1]
    assert len(found["static"]) == 3 and "spring" not in {near["word"] for near in found["static"]}
    assert {name: list(own["of any word"][0]) for name, own in found["models"].items()} == {
        "RNN": ["embeddings", "layer 1"],
        "ELMo": ["words", "layer 1", "layer 2"],
    }
    corpus = sense_data.text(None)
    assert found["corpus"] == {"sentences": len(corpus), "words": sum(map(len, corpus))}
    rnn = pretrained.load(str(trained / "rnn"))
    index = nearest_words.OccurrenceIndex(rnn, corpus)
    for way, words, per_word in (("of the word", "same", None), ("of any word", "any", 1)):
        for query, own in zip(sentences.split("|"), found["models"]["RNN"][way], strict=True):
            for layer, near in index.nearest(query.split(), 1, count=3, words=words, per_word=per_word).items():
                assert [(" ".join(n.sentence), n.place) for n in near] == [
                    (n["sentence"], n["place"]) for n in own[layer]
                ]
                np.testing.assert_allclose([n.cosine for n in near], [n["cosine"] for n in own[layer]], atol=1e-3)
    assert {near["word"] for near in found["models"]["ELMo"]["of the word"][1]["layer 2"]} <= {"spring", "Spring"}
    table = (tmp_path / "neighbours.md").read_text()
    assert "## RNN: occurrences of the word" in table and "a *spring* of steel" in table
    assert str(tmp_path / "neighbours.md") in done.out.splitlines()


def test_senses_are_told_beside_what_knows_no_context(trained, start, tmp_path):
    done = start("neighbours", "--task=senses", f"--models={trained / 'bert'}", "--k=3", f"--workdir={tmp_path}").wait()
    assert done.status == 0, done.err
    found = read(tmp_path / "senses.json")
    rows = {(row["model"], row["layer"], row["method"]): row for row in found["scores"]}
    assert len(rows) == 1 + 2 * (2 + 3) and (found["train"], found["test"]) == (16, 8)
    # A vector that is the same in every sentence cannot tell senses that are equally frequent.
    for place in (("no vectors", "", "most frequent"), ("word2vec, word", "static", "nearest mean")):
        assert rows[place]["micro"] == 0.5
    for row in rows.values():
        assert row["micro"] == sum(row["right"].values()) / 8
        assert row["micro_interval"][0] <= row["micro"] <= row["micro_interval"][1]
    best = rows["BERT", "layer 2", "k nearest"]
    assert f"| BERT | layer 2 | k nearest | {100 * best['micro']:.1f} [" in (tmp_path / "senses.md").read_text()
    assert (tmp_path / "senses_BERT.png").stat().st_size > 10_000


def test_probes_say_what_each_layer_knows(trained, start, tmp_path):
    done = start(
        "probe", f"--models={trained / 'elmo'}", "--epochs=100", "--test_words=30", f"--workdir={tmp_path}"
    ).wait()
    assert done.status == 0, done.err
    found = read(tmp_path / "probe.json")
    assert set(found["models"]["ELMo"]) == {"parts of speech", "word senses"}
    assert found["tested"]["word senses"] == 8 and found["tested"]["parts of speech"] <= 30
    for task, own in found["models"]["ELMo"].items():
        assert [score["layer"] for score in own["scores"]] == ["words", "layer 1", "layer 2"]
        assert sum(own["mix"]) == pytest.approx(1) and 0 <= own["centre_of_gravity"] <= 2
        assert own["candidates"] == sorted(own["candidates"], key=["words", "layer 1", "layer 2"].index)
        for score in own["scores"]:
            assert score["interval"][0] < score["accuracy"] < score["interval"][1] or score["accuracy"] in (0, 1)
            assert score["accuracy"] * found["tested"][task] == pytest.approx(
                round(score["accuracy"] * found["tested"][task]), abs=1e-4
            )
    # A vector of the word's characters alone, whatever is around it, cannot tell its senses but by chance.
    senses_of_words = found["models"]["ELMo"]["word senses"]
    assert senses_of_words["floors"] == {"majority": 0.25, "majority of the word": 0.5}
    assert senses_of_words["scores"][0]["accuracy"] == 0.5
    assert found["paragraph"] in " ".join(done.out.split()) and "lower layers know syntax" in found["paragraph"]
    for name in ("probe_ELMo.png", "mix_ELMo.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert "| none: majority of the word | 50.0 |" in (tmp_path / "probe.md").read_text()


def probing(accuracies):
    scores = tuple(LayerScore(f"layer {n}", a, 0.5) for n, a in enumerate(accuracies))
    floors_ = {"majority": 0.25, "majority of the word": 0.5}
    return Probing("x", scores, (0.25, 0.25, 0.5), 0.9, (0.5, 0.75, 0.9), floors_)


@pytest.mark.parametrize(
    ("syntax", "meaning", "verdict"),
    [
        ((0.5, 0.9, 0.5), (0.5, 0.6, 0.8), "This is as claimed."),
        ((0.5, 0.6, 0.8), (0.5, 0.9, 0.5), "This is the opposite of what is claimed."),
        ((0.5, 0.9, 0.5), (0.5, 0.8, 0.5), "Both are in one layer, which the claim does not foresee."),
        ((0.5, 0.9, 0.5), (0.5, 0.799, 0.8), "The best layers are in the order that is claimed, but"),
        ((0.5, 0.9, 0.901), (0.5, 0.8, 0.5), "The best layers are in the opposite order, but"),
        ((0.5, 0.9, 0.899), (0.5, 0.8, 0.5), "One layer is best for both, but"),
    ],
)
def test_the_paragraph_follows_from_the_numbers(syntax, meaning, verdict):
    said = probe_report.paragraph(
        {"BERT": {probe_report.TAGS: probing(syntax), probe_report.SENSES: probing(meaning)}},
        {probe_report.TAGS: 1000, probe_report.SENSES: 1000},
    )
    assert verdict in said
    assert f"best in layer {np.argmax(syntax)} ({100 * max(syntax):.1f} %" in said
    assert f"word senses are best in layer {np.argmax(meaning)} ({100 * max(meaning):.1f} %" in said
    assert "centres at 1.25 and 1.25" in said and "50.0 % of parts of speech" in said


def test_floors_of_masked_words_are_measured_on_the_runs_examples(trained, start):
    done = start("floors", f"--workdir={trained / 'bert'}", "--examples=300").wait()
    assert done.status == 0, done.err
    content = read(trained / "bert" / "floors.json")
    records = read(trained / "bert" / "result.json")["records"]
    run = {(r["split"], r["metric"]): r["value"] for r in records}
    found = {(row["split"], row["name"]): row for row in content["floors"]}
    task = tasks.create("masked_lm", **MODELS["bert"][1])
    for split in ("validation", "test"):
        assert found[split, "most frequent piece"]["value"] == task.unigram_accuracy(split)
        assert found[split, "most frequent piece"]["run"] == pytest.approx(1 - run[split, "mlm_error"])
        following = task.dataset(split, 40)["next"]
        more = np.bincount(task.dataset("train", 300)["next"]).argmax()
        assert found[split, "more frequent answer"]["value"] == pytest.approx(np.mean(following == more))
        words = found[split, "bag of words"]
        assert words["run"] == pytest.approx(1 - run[split, "nsp_error"]) and 0.3 < words["value"] <= 1
    assert content["run"] == "result.json" and "bag of words" in (trained / "bert" / "floors.md").read_text()


def create(name, model, options, encoding="none"):
    return ExperimentConfig.from_mapping(
        {
            "task": {"name": name, "options": options},
            "model": model,
            "encoding": encoding,
            "evaluation": {"examples": 8, "batch_size": 4},
        }
    )


def test_the_floor_of_words_is_a_unigram():
    config = create("words", MODELS["rnn"][2], {"length": 8})
    task = tasks.create("words", length=8)
    (floor, _) = baselines.find(task, config, {("validation", "loss"): 5.0, ("test", "loss"): 6.0}, 1)
    train, seen = wikitext.words(None, "train"), wikitext.words(None, "validation")[:64]
    counts = {word: 1 + train.count(word) for word in {*train, "<unk>"}}
    total = sum(counts.values())
    # Rows of the evaluation's two batches are four parts of the split, not its first words.
    batches = pipeline.evaluation_batches(task, "validation", examples=8, batch_size=4, seed=0)
    read_words = [task.vocabulary.words[n] for batch in batches for n in batch["targets"][batch["weights"] > 0]]
    assert len(read_words) == len(seen)
    expected = np.exp(-np.mean([np.log(counts[word] / total) for word in read_words]))
    assert (floor.split, floor.measure) == ("validation", "perplexity")
    assert floor.value == pytest.approx(expected) and floor.run == pytest.approx(np.exp(5.0))


def test_the_floor_of_both_directions_knows_the_ends_of_sentences():
    task = tasks.create("bilm", length=8, max_characters=12)
    (floor, _) = baselines.find(task, create("bilm", MODELS["elmo"][2], {}), {}, 1)
    words = [
        [w for s in document for w in (*s, "</S>")]
        for document in sentences_by_corpus.documents("wikitext-2", None, "train")
    ]
    train = [word for document in words for word in document]
    stream = task.stream("train", 4)
    forward = unigrams.probabilities([stream[i] for i in range(len(stream))], task.vocab_size)[""]
    assert forward[task.vocabulary.number("</S>")] == (train.count("</S>") + 1) / (len(train) + task.vocab_size)
    assert forward[task.vocabulary.number("<S>")] == 1 / (len(train) + task.vocab_size)
    assert floor.run is None and 20 < floor.value < task.vocab_size


def test_the_floor_of_tags_is_the_words_majority(start, tmp_path):
    config = create("tagging", {"name": "tagger", "word_dim": 8, "recurrent": (8,)}, {"length": 12})
    workdirs.open_workdir(tmp_path, config, [0])
    rows = [
        {"step": 2, "seed": 0, "split": "test", "token_error": 0.9},
        {"step": 4, "seed": 0, "split": "test", "token_error": 0.75},
        {"step": 5, "seed": 0, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = start("floors", f"--workdir={tmp_path}").wait()
    assert done.status == 0, done.err
    content = read(tmp_path / "floors.json")
    found = {(row["split"], row["name"]): row for row in content["floors"]}
    task = tasks.create("tagging", length=12)
    own = found["test", "most frequent of the word"]
    assert (own["value"], own["run"]) == (task.majority("test"), 0.25)  # of the last step that was measured
    assert 0 < found["test", "most frequent tag"]["value"] < own["value"]
    assert found["validation", "most frequent of the word"]["run"] is None
    assert content["run"] == "metrics.jsonl"


def test_sentences_with_the_word_come_first():
    text = [(f"w{n}", "Play" if n % 10 == 0 else "x") for n in range(100)]
    chosen = sense_data.choose(text, "play", 8)
    assert len(set(chosen)) == 8 and sum("Play" in sentence for sentence in chosen) == 4
    assert sorted(sense_data.choose(text, "play", 1000)) == sorted(text)
    assert chosen == sense_data.choose(text, "play", 8)
    with pytest.raises(ConfigError, match="the corpus has no word 'pla'"):
        sense_data.choose(text, "pla", 8)


def test_the_mean_of_a_context_knows_its_words_alone():
    rng = np.random.default_rng(0)
    vectors = {word: rng.normal(size=4) for word in "abcd"}
    embed = sense_data.ContextMean(vectors)
    (ours,), (theirs,), (alone,) = embed([list("abcd")]), embed([list("cbda")]), embed([["a", "unseen"]])
    np.testing.assert_allclose(ours[0, 1], theirs[0, 1], rtol=1e-5)  # of another order
    np.testing.assert_allclose(ours[0, 0], np.mean([vectors[w] for w in "bcd"], axis=0), rtol=1e-5)
    assert not alone[0, 0].any() and np.allclose(alone[0, 1], vectors["a"])


@pytest.mark.parametrize("module", [baselines, probe_report, sense_data], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("neighbours", ["--models=minilm", "--word=play", "--sentences=they win"], "has no word 'play': set spaces"),
        ("neighbours", ["--models=minilm"], "missing --word and --sentences; see --help"),
        ("neighbours", ["--models=minilm", "--word=play", "--sentences=|"], "--sentences has no sentence"),
        ("neighbours", ["--models=", "--task=senses"], "--models names no model"),
        ("neighbours", ["--models=RUN,RUN", "--task=senses"], "twice: name each model once"),
        ("neighbours", ["--models=nowhere", "--task=senses"], "there is no folder nowhere: train a model there"),
        ("neighbours", ["--models=RUN", "--word=qqq", "--sentences=a qqq"], "the corpus has no word 'qqq'"),
        (
            "neighbours",
            ["--models=RUN", "--task=senses", "--data_dir=nowhere"],
            "no coarsewsd20/coarsewsd20.tsv in nowhere",
        ),
        ("neighbours", ["--task=senses"], "missing --models; see --help"),
        ("probe", [], "missing --models; see --help"),
        ("probe", ["--models=nowhere"], "there is no folder nowhere"),
        ("probe", ["--models=RUN", "--data_dir=nowhere"], "no ud-ewt/en_ewt-ud-train.conllu in nowhere"),
        ("probe", ["--models=RUN", "--train_words=0"], "--train_words=0"),
        ("floors", [], "holds no training run"),
        ("floors", ["--examples=1"], "--examples=1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_line(command, given, message, trained, start, tmp_path):
    given = [re.sub("RUN", str(trained / "rnn"), flag) for flag in given]
    done = start(command, *given, f"--workdir={tmp_path / 'new'}").wait()
    assert done.status == 2, done.err
    assert message in done.error
    assert not (tmp_path / "new").exists()


def test_floors_are_known_of_some_tasks(start, config, tmp_path):
    workdirs.open_workdir(tmp_path, ExperimentConfig.from_mapping({"task": {"name": "flip_flop", "options": {}}}), [0])
    done = start("floors", f"--workdir={tmp_path}").wait()
    assert done.status == 2, done.err
    assert "learns flip_flop: floors are known of bilm, masked_lm, tagging, words" in done.error


def test_perplexity_is_measured_of_decoders_on_text(start, trained):
    done = start("perplexity", f"--workdir={trained / 'rnn'}").wait()
    assert done.status == 2, done.err
    assert done.error == f"{trained / 'rnn'} holds a rnn_lm on words: this measures decoders on text"
