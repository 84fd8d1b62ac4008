import json

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import baselines, sentences_by_corpus, wikitext
from cope_jax.data import pipeline
from cope_jax.evaluation.contextual import task_baselines
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import MODELS


def create(name, model, options, encoding="none"):
    return ExperimentConfig.from_mapping(
        {
            "task": {"name": name, "options": options},
            "model": model,
            "encoding": encoding,
            "evaluation": {"examples": 8, "batch_size": 4},
        }
    )


def test_the_baseline_of_words_is_a_unigram():
    config = create("words", MODELS["rnn"][2], {"length": 8})
    task = tasks.create("words", length=8)
    ((baseline, run), _) = task_baselines.measure(
        task, config, {("validation", "loss"): 5.0, ("test", "loss"): 6.0}, 1
    )
    train, seen = wikitext.words(None, "train"), wikitext.words(None, "validation")[:64]
    counts = {word: 1 + train.count(word) for word in {*train, "<unk>"}}
    total = sum(counts.values())
    # Rows of the evaluation's two batches are four parts of the split, not its first words.
    batches = pipeline.evaluation_batches(task, "validation", examples=8, batch_size=4, seed=0)
    read_words = [
        task.vocabulary.words[n]
        for batch in batches
        for n in batch["targets"][batch["weights"] > 0]
    ]
    assert len(read_words) == len(seen)
    expected = np.exp(-np.mean([np.log(counts[word] / total) for word in read_words]))
    assert (baseline.split, baseline.measure) == ("validation", "perplexity")
    assert baseline.value == pytest.approx(expected) and run == pytest.approx(np.exp(5.0))


def test_the_baseline_of_both_directions_knows_the_ends_of_sentences():
    task = tasks.create("bilm", length=8, max_characters=12)
    ((baseline, run), _) = task_baselines.measure(
        task, create("bilm", MODELS["elmo"][2], {}), {}, 1
    )
    words = [
        [w for s in document for w in (*s, "</S>")]
        for document in sentences_by_corpus.documents("wikitext-2", None, "train")
    ]
    train = [word for document in words for word in document]
    stream = task.stream("train", 4)
    forward = baselines.unigram_probabilities(
        [stream[i] for i in range(len(stream))], task.vocab_size
    )[""]
    assert forward[task.vocabulary.number("</S>")] == (train.count("</S>") + 1) / (
        len(train) + task.vocab_size
    )
    assert forward[task.vocabulary.number("<S>")] == 1 / (len(train) + task.vocab_size)
    assert run is None and 20 < baseline.value < task.vocab_size


def test_the_baseline_of_tags_is_the_words_majority(tmp_path):
    config = create("tagging", {"name": "tagger", "word_dim": 8, "recurrent": (8,)}, {"length": 12})
    rows = [
        {"step": 2, "seed": 0, "split": "test", "token_error": 0.9},
        {"step": 4, "seed": 0, "split": "test", "token_error": 0.75},
        {"step": 5, "seed": 0, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = tasks.create("tagging", length=12)
    assert {"tagging", "masked_lm"} <= {
        *task_baselines.known()
    } and "counting" not in task_baselines.known()
    run, source = task_baselines.run_figures(tmp_path)
    measured = {
        (baseline.split, baseline.name): (baseline.value, figure)
        for baseline, figure in task_baselines.measure(task, config, run, 1)
    }
    word = measured["test", "most frequent of the word"]
    assert word == (task.majority("test"), 0.25)  # of the last step that was measured
    assert 0 < measured["test", "most frequent tag"][0] < word[0]
    assert measured["validation", "most frequent of the word"][1] is None
    assert source == "metrics.jsonl"
