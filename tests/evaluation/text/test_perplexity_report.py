"""Perplexities of models so simple that one can count them, and of windows that share rows."""

import collections
import itertools
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import tasks
from cope_jax.corpora.raw_text import documents
from cope_jax.corpora.text_units import Counts
from cope_jax.evaluation.text import perplexity_report as report
from cope_jax.ops.losses import token_measures
from cope_jax.tokenizers.word_level import EOS
from cope_jax.training.evaluator import Evaluator
from tests.training import tiny

pytestmark = pytest.mark.xdist_group("perplexity")


class Reader(nnx.Module):
    """Logits from the mean of a segment's tokens so far and the position: shows wrong windows."""

    config = SimpleNamespace(block=SimpleNamespace(model_dim=1))
    encoding = SimpleNamespace(embed=lambda x_BLD, positions_BL: x_BLD)

    def __init__(self, vocab_size, *, context=True):
        table = np.random.default_rng(0).normal(size=(vocab_size, vocab_size))
        self.table_VV = nnx.Param(jnp.asarray(table, jnp.float32))
        self.context = context

    def __call__(self, tokens_BL, *, positions_BL, segment_ids_BL=None):
        if not self.context:
            return jnp.broadcast_to(self.table_VV[0], (*tokens_BL.shape, self.table_VV.shape[1]))
        rows, length = tokens_BL.shape
        segments_BL = (
            jnp.zeros((rows, length), jnp.int32) if segment_ids_BL is None else segment_ids_BL
        )
        past_BLM = (segments_BL[:, :, None] == segments_BL[:, None]) & jnp.tri(length, dtype=bool)[
            None
        ]
        past_BLM = past_BLM.astype(jnp.float32)
        weights_BLM = past_BLM / past_BLM.sum(2, keepdims=True)
        logits_BLV = jnp.einsum("BLM,BMV->BLV", weights_BLM, self.table_VV[tokens_BL])
        return logits_BLV * (1 + jnp.sin(positions_BL.astype(jnp.float32)))[..., None]


def evaluator(task, splits, carry=lambda rows: (), traced=None, **options):
    model = Reader(task.vocab_size)
    graph, state = nnx.split(model)

    def metrics(state, carry, batch):
        if traced is not None:
            traced.append(batch["inputs"].shape)
        read = nnx.merge(graph, state)
        logits_BLV = read(
            batch["inputs"], positions_BL=batch["positions"], segment_ids_BL=batch.get("segments")
        )
        return token_measures(logits_BLV, batch["targets"], batch["weights"]), carry

    program = tiny.measuring(metrics, initial_carry=carry, **options)
    splits = dict.fromkeys(splits, 10**6)
    return Evaluator(program, task, splits, batch_size=3, data_seed=0), state


def create(**options):
    return tasks.create("text", **{"vocab_size": 300, "length": 8, "sweep": (8, 16, 32)} | options)


@pytest.mark.parametrize("kind", ["bpe", "words", "bytes"])
def test_the_perplexity_of_a_unigram_model_is_that_counted_by_hand(kind):
    task = create(tokenizer=kind, vocab_size=None if kind != "bpe" else 300)
    model = Reader(task.vocab_size, context=False)
    logits_V = np.asarray(model.table_VV[0], np.float64)
    log_p = logits_V - np.log(np.exp(logits_V).sum())
    texts = documents("wikitext-2", None, "test")
    said = collections.Counter(token for text in texts for token in task.encode(text).tolist())
    nats = -sum(count * log_p[token] for token, count in said.items())
    words = sum(len(line.split()) + 1 for text in texts for line in text.split("\n")[:-1])
    measured = report.read(model, task, "test", 8, 4, 16, 4)
    row = report.record(task, "test", 8, 4, measured)
    assert row["token_perplexity"] == pytest.approx(math.exp(nats / said.total()), rel=1e-5)
    figures = Counts(1, words, sum(len(text.encode()) for text in texts)).per_unit(nats)
    assert figures["perplexity"] == pytest.approx(math.exp(nats / words))
    assert figures["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / sum(len(text.encode()) for text in texts)
    )
    for name in ("perplexity", "bits_per_byte"):
        # The sample is so small that its test has words that training has not.
        assert row.get(name) == (
            pytest.approx(figures[name], rel=1e-5) if kind != "words" else None
        )
    assert row["tokens"] == said.total() == len(measured.nats)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_windows_that_do_not_overlap_are_those_of_the_evaluator(packing):
    task = create(packing=packing)
    evaluate, state = evaluator(task, ["validation", "test", "length=16"])
    measured = evaluate(state)
    model = Reader(task.vocab_size)
    for split, length in (("validation", 8), ("test", 8), ("length=16", 16)):
        name = "test" if "=" in split else split
        row = report.record(
            task, name, length, length, report.read(model, task, name, length, length, 16, 4)
        )
        (errors,) = measured[split]
        for figure in report.FIGURES:
            assert errors[figure] == pytest.approx(row[figure], rel=1e-5), (split, figure)
        assert "sequence_error" not in errors


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_windows_side_by_side_are_measured_as_if_alone(packing):
    task = create(packing=packing)
    splits = ["validation", "test", "length=12", "length=32"]  # 12 leaves a rest of 8
    traced = []
    evaluate, state = evaluator(task, splits, traced=traced)
    together = evaluate(state)
    assert traced == [(3, 8), (3, 32)]  # the length of training, and all others
    for split in splits:
        alone, _ = evaluator(task, [split])
        for name, value in alone(state)[split][0].items():
            assert together[split][0][name] == pytest.approx(value, rel=1e-5), (split, name)


def test_windows_share_rows_unless_a_state_would_go_from_one_to_the_next():
    batches = {}
    for carried in (False, True):
        placed = []
        carry = (lambda rows: jnp.zeros((rows, 1))) if carried else (lambda rows: ())

        def put(batch, placed=placed):
            placed.append(batch)
            return batch

        evaluate, state = evaluator(create(), ["length=4", "length=32"], carry, put=put)
        evaluate(state, ["length=4"], 5)
        batches[carried] = placed
    assert len(batches[False]) == 1  # 24 windows of 4 in 3 rows of 32
    assert len(batches[True]) == 2  # 3 windows in as many rows
    assert "segments" not in batches[True][0]
    weights = (
        [int(batch["weights"].sum()) for batch in batches[False]],
        [int(batch["weights"].sum()) for batch in batches[True]],
    )
    assert weights == ([96], [12, 12])


def test_strides_agree_for_a_model_without_context():
    task = create()
    model = Reader(task.vocab_size, context=False)
    measured = [report.read(model, task, "test", 8, stride, 16, 4) for stride in (1, 5, 8)]
    for losses, other in itertools.pairwise(measured):
        np.testing.assert_allclose(losses.nats, other.nats, rtol=1e-6)
    assert measured[0].seen.mean() > measured[1].seen.mean() > measured[2].seen.mean()


def test_the_figures_of_a_part_have_the_ratio_of_the_whole():
    task = create()
    counts = task.counts("validation")
    reported = task.reported_metrics(
        "validation", {"loss": 2.0, "token_error": 0.5, "sequence_error": 1.0}
    )
    assert reported["perplexity"] == pytest.approx(math.exp(2 * counts.tokens / counts.words))
    assert reported["token_perplexity"] == pytest.approx(math.exp(2))
    assert reported["bits_per_byte"] == pytest.approx(
        2 * counts.tokens / counts.bytes / math.log(2)
    )
    assert list(reported)[:2] == ["loss", "token_error"]
    assert task.reported_metrics("test", {"loss": 1e9})["perplexity"] == math.inf
    assert task.metric == "perplexity"
    words = tasks.create("words", length=8)
    assert words.reported_metrics("test", {"loss": 2.0}) == {"loss": 2.0, "perplexity": math.exp(2)}
    assert words.metric == "perplexity"


def test_code_has_no_words_to_compare_by(tmp_path):
    (tmp_path / "code").mkdir()
    for number in range(60):
        (tmp_path / "code" / f"m{number}.py").write_text(
            f"value_{number} = {number} + {number**3}\n"
        )
    task = create(corpus="files+code", data_dir=str(tmp_path), tokenizer="bytes", vocab_size=None)
    assert task.metric == "token_perplexity"


def test_unknown_words_leave_only_figures_by_token():
    few = create(tokenizer="words", vocab_size=20)
    text = " ".join(documents("wikitext-2", None, "test")).replace("\n", f" {EOS} ").split()
    assert (
        few.counts("test").unknown
        == sum(word not in few.tokenizer.vocabulary for word in text)
        > 30
    )
    assert few.metric == "token_perplexity"
    assert few.reported_metrics("test", {"loss": 2.0}) == {
        "loss": 2.0,
        "token_perplexity": pytest.approx(math.exp(2)),
    }
    measured = report.read(Reader(few.vocab_size, context=False), few, "test", 8, 4, 16, 4)
    row = report.record(few, "test", 8, 4, measured)
    assert row["unknown"] == few.counts("test").unknown and "perplexity" not in row
    assert list(report.figures_table([row]).headings)[3:] == ["token perplexity", "loss"]


def rows(values):
    by_seen = {"seen": [1.0, 2.0], "loss": [3.0, 2.5]}
    common = {
        "split": "test",
        "step": 2,
        "tokens": 9,
        "words": 4,
        "bytes": 30,
        "known_tokens": 3.5,
        "by_seen": by_seen,
    }
    return [
        {
            **common,
            "seed": seed,
            "length": length,
            "stride": 2,
            **dict.fromkeys(report.FIGURES, value),
        }
        for length, values_of_seeds in values.items()
        for seed, value in enumerate(values_of_seeds)
    ]


def test_tables_and_plots_have_a_row_a_line_or_a_point_for_each_length():
    records = rows({4: [5.0, 7.0], 8: [4.0, 4.0], 16: [80.0, 90.0]})
    table = report.figures_table(records)
    assert [cells[0] for cells in table.rows] == ["4", "8", "16"]
    assert [cells[3] for cells in table.rows] == ["6.000 ± 1.414", "4.000 ± 0.000", "85.00 ± 7.07"]
    assert [cells[1] for cells in report.positions_table(records[:2]).rows] == [
        "3.000 ± 0.000",
        "2.500 ± 0.000",
    ]
    assert table.caption == "windows of 16 are longer than the text (9 tokens): they read it whole"
    (axes,) = report.loss_by_position(records, "decoder").axes
    assert axes.figure.get_supxlabel().replace("\n", " ") == (
        "2 steps; mean of 2 seeds; bands: lowest to highest seed; "
        "windows of 16 are longer than the text (9 tokens): they read it whole"
    )
    assert [line.get_label() for line in axes.lines] == [
        "windows of 4",
        "windows of 8",
        "windows of 16",
    ]
    (axes,) = report.by_length(records, "perplexity", 8, "decoder").axes
    assert axes.figure.legends[0].get_title().get_text() == "perplexity on test, decoder"
    assert axes.lines[0].get_ydata().tolist() == [6, 4, 85]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.texts] == ["training"]


def test_small_differences_stay_small():
    (axes,) = report.by_length(rows({4: [1021.0], 8: [1017.0]}), "perplexity", 8, "decoder").axes
    assert axes.get_ylim() == pytest.approx((0.95 * 1019, 1.05 * 1019))
