"""Requests of lm-evaluation-harness to a small decoder, against loops over single prefixes."""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.evaluation.text import harness_model, likelihood, perplexity_report
from cope_jax.evaluation.text.harness_model import HarnessModel
from cope_jax.evaluation.text.likelihood import losses, sliding
from cope_jax.generation import decoding
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import Decoder, DecoderConfig
from cope_jax.runs.load import load_run
from cope_jax.tokenizers.tokenizer import Codec
from cope_jax.tokenizers.word_level import Words
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from tests.commands.pretrained import BLOCK, write_run

pytestmark = pytest.mark.xdist_group("harness_model")
LENGTH = 8
LETTERS = "\nabcde f"  # the number of a letter is its token; the first begins and ends texts
CODEC = Codec(
    lambda text: np.array([LETTERS.index(letter) for letter in text], np.int32),
    lambda tokens: "".join(LETTERS[token] for token in tokens),
    (0,),
)
ROUNDING = 2e-5  # float32, of at most 8 tokens; the loops below sum in float64


def requests(*arguments, task="task"):
    return [SimpleNamespace(args=args, task_name=task) for args in arguments]


def create(encoding="cope+rope", length=64):
    config = DecoderConfig(
        vocab_size=len(LETTERS),
        max_length=length,
        num_layers=2,
        encoding=EncodingConfig.parse(encoding),
        block=BlockConfig(model_dim=8, num_heads=2),
    )
    decoder = Decoder(config, rngs=nnx.Rngs(3))
    # So that tokens differ much in probability, and greedy text is no single letter.
    state = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, nnx.state(decoder, nnx.Param))
    nnx.update(decoder, state)
    return decoder


@pytest.fixture(scope="module")
def decoder():
    return create()


@pytest.fixture(scope="module")
def model(decoder):
    return HarnessModel(decoder, CODEC, LENGTH, ends=[0], batch_size=3)


@pytest.fixture(scope="module")
def next_token(decoder):
    """tokens → the log-probabilities of the next one; at most `LENGTH` tokens, from position 0."""
    graph, state = nnx.split(decoder)
    read = jax.jit(lambda state, tokens_BL: nnx.merge(graph, state)(tokens_BL))

    def after(tokens):
        tokens_1L = np.zeros((1, LENGTH), np.int32)
        tokens_1L[0, : len(tokens)] = tokens
        logits_V = np.asarray(read(state, tokens_1L)[0, len(tokens) - 1], np.float64)
        return logits_V - np.log(np.exp(logits_V).sum())

    return after


def by_hand(next_token, before, after):
    """The log-probability of `after` and if it is greedy, with the window's cut on the left."""
    whole = [*before, *after][-LENGTH - 1 :]
    predictions = [
        (next_token(whole[:index]), whole[index])
        for index in range(len(whole) - len(after), len(whole))
    ]
    return sum(log_p[token] for log_p, token in predictions), all(
        log_p.argmax() == token for log_p, token in predictions
    )


def greedy(next_token, tokens, count):
    """`count` most probable tokens; all of them fit into a window."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(next_token(tokens).argmax()))
    return tokens[len(tokens) - count :]


def pairs(next_token):
    """Contexts and continuations of many lengths, half of them greedy, some beyond a window."""
    cases = []
    for context in ("", "a", "ab", "f cab", "abcdefaba", "cab" * 9):
        cases += [(context, after) for after in ("a", "bc", "e fa")]
        start = [0, *CODEC.encode(context)]
        for count in (1, 3):
            best = greedy(next_token, start[-(LENGTH + 1 - count) :], count)
            cases.append((context, CODEC.decode(best)))
    return cases


def test_metrics_of_another_text_are_left_out_of_its_task(decoder, monkeypatch):
    monkeypatch.setattr(HarnessModel, "_score", lambda _, parts, label: [(0.0, True)] * len(parts))
    codec = Codec.of(Words.train(["a b\n"]))
    model = HarnessModel(decoder, codec, LENGTH)
    texts = {"same": "a b\na b", "spaces": "a  b\t\ta    b", "unknown": "a c"}
    for task, text in texts.items():
        model.loglikelihood_rolling(requests((text,), ("a",), task=task))
    assert model.lost == {"same": (0, 0), "spaces": (0, 1), "unknown": (1, 1)}
    values = dict.fromkeys(
        ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,short", "acc,none"), 2.0
    )
    results = {"results": dict.fromkeys([*texts, "choice"], values), "groups": {"all": values}}
    records, left_out = harness_model.records(results, model.lost)
    words = {"word_perplexity", "acc"}
    figures = {"word_perplexity", "byte_perplexity", "bits_per_byte (short)", "acc"}
    for task, kept in {
        "same": figures,
        "choice": figures,
        "spaces": words,
        "unknown": {"acc"},
        "all": {"acc"},
    }.items():
        assert {record["metric"] for record in records if record["task"] == task} == kept
    no_words = "no perplexity per word, no bits per byte: the tokenizer loses words (1)"
    no_bytes = "no bits per byte: the tokenizer changes bytes of texts (1)"
    assert left_out == {"all": no_words, "spaces": no_bytes, "unknown": no_words}
    records, _ = harness_model.records(results, {"of unknown name": (1, 1)})
    assert {record["metric"] for record in records} == {"acc"}


def test_likelihoods_and_greedy_flags_are_those_of_a_loop(model, next_token):
    asked = pairs(next_token)
    measured = model.loglikelihood(requests(*asked))
    wanted = [
        by_hand(next_token, [0, *CODEC.encode(before)], CODEC.encode(after))
        for before, after in asked
    ]
    np.testing.assert_allclose(
        [value for value, _ in measured], [value for value, _ in wanted], rtol=0, atol=ROUNDING
    )
    assert [flag for _, flag in measured] == [flag for _, flag in wanted]
    assert {flag for _, flag in measured} == {True, False}
    assert all(type(value) is float and type(flag) is bool for value, flag in measured)


def test_a_result_does_not_depend_on_the_other_requests(model, next_token):
    asked = pairs(next_token)
    whole = model.loglikelihood(requests(*asked))
    for request, (value, flag) in list(zip(asked, whole, strict=True))[::4]:
        ((alone, same),) = model.loglikelihood(requests(request))
        assert (alone, same) == (pytest.approx(value, abs=ROUNDING), flag)
    backwards = model.loglikelihood(requests(*asked[::-1]))[::-1]
    np.testing.assert_allclose(
        [value for value, _ in backwards], [value for value, _ in whole], rtol=0, atol=ROUNDING
    )


def test_a_context_is_cut_on_the_left(model):
    cut, whole = model.loglikelihood(
        requests(("c" * 5 + "abdefa", "bc"), ("a" * 40 + "abdefa", "bc"))
    )
    assert whole != cut, "one letter before the others is still seen"
    same = model.loglikelihood(requests(("c" * 5 + "fabdefa", "bc"), ("a" * 40 + "fabdefa", "bc")))
    assert same[0] == same[1]


def test_spaces_after_a_context_belong_to_the_continuation(model):
    moved, given = model.loglikelihood(requests(("ab ", "c"), ("ab", " c")))
    assert moved == given
    assert model.loglikelihood(requests(("ab", ""))) == [(0.0, True)], "nothing is certain"


def test_rows_of_a_model_beyond_its_tokenizer_are_not_drawn(decoder):
    model = HarnessModel(decoder, CODEC._replace(size=3), LENGTH, ends=[0], batch_size=3)
    settings = {"until": [], "max_gen_toks": 6, "temperature": 9.0, "do_sample": True}
    texts = model.generate_until(requests(*((text, settings) for text in "abcdef")))
    assert {*"".join(texts)} == {"a", "b"}


def test_tokens_across_the_border_of_context_and_continuation():
    """With a tokenizer that reads "ab" as one token."""
    codec = Codec(lambda text: CODEC.encode(text.replace("ab", "e")), CODEC.decode, (0,))
    model = HarnessModel(create(), codec, LENGTH)
    short, longer, c = model.loglikelihood(requests(("a", "b"), ("ca", "bd"), ("ca", "d")))
    (alone,) = HarnessModel(create(), CODEC, LENGTH).loglikelihood(requests(("a", "b")))
    assert short == alone and short[0] < 0
    assert longer == pytest.approx(c, abs=ROUNDING)


def test_a_text_is_read_in_windows_of_which_the_last_is_full(model, next_token):
    texts = ["", "a", "abcde f", "abcdefab", "fed cab" * 3 + "ab"]
    wanted = []
    for text in texts:
        tokens = [0, *CODEC.encode(text)]
        total = 0.0
        for index in range(1, len(tokens)):
            # The window's last predicted token.
            last = min(len(tokens) - 1, -(-index // LENGTH) * LENGTH)
            total += next_token(tokens[max(0, last - LENGTH) : index])[tokens[index]]
        wanted.append(total)
    measured = model.loglikelihood_rolling(requests(*((text,) for text in texts)))
    np.testing.assert_allclose(measured, wanted, rtol=0, atol=5 * ROUNDING)
    (alone,) = model.loglikelihood_rolling(requests((texts[-1],)))
    assert alone == pytest.approx(measured[-1], abs=5 * ROUNDING)


def test_windows_that_fill_the_text_are_those_of_perplexity(model, decoder):
    text = "fed cab " * 5
    (likelihood,) = model.loglikelihood_rolling(requests((text,)))
    tokens = np.array([0, *CODEC.encode(text)])
    assert len(tokens) - 1 == 5 * LENGTH
    wanted = losses(decoder, sliding(tokens, LENGTH)).nats.sum()
    assert likelihood == pytest.approx(-wanted, abs=5 * ROUNDING)


def test_few_programs_serve_all_lengths(decoder, next_token):
    model = HarnessModel(decoder, CODEC, 64, batch_size=2)
    before = likelihood._losses._cache_size()
    asked = [("a" * size, "b" * count) for size in range(1, 60, 7) for count in (1, 2, 9)]
    model.loglikelihood(requests(*asked))
    for size in range(17, 31, 3):
        model.loglikelihood(requests(("a" * size, "b")))
    model.loglikelihood_rolling(requests(("abc" * 99,)))
    assert likelihood._losses._cache_size() - before <= 2


def test_greedy_text_ends_before_the_first_of_several_stop_texts(decoder, next_token):
    model = HarnessModel(decoder, CODEC, LENGTH, batch_size=2)
    contexts = ["f", "ab", "ca", "d", "e ", "b f"]
    texts = [
        CODEC.decode(greedy(next_token, [0, *CODEC.encode(context)], 4)) for context in contexts
    ]
    assert len(set(texts)) > 2, texts
    before = decoding._first._cache_size()
    settings = {"max_gen_toks": 4, "do_sample": False, "temperature": 0.7}
    assert model.generate_until(requests(*((context, settings) for context in contexts))) == texts
    for stops in itertools.combinations(["a", "b", "fc", "de", "c", " "], 2):
        wanted = [min((text.split(stop)[0] for stop in stops), key=len) for text in texts]
        asked = requests(*((context, {**settings, "until": list(stops)}) for context in contexts))
        assert model.generate_until(asked) == wanted
    assert decoding._first._cache_size() - before <= 1, (
        "one program for all contexts and stop texts"
    )
    (alone,) = model.generate_until(
        requests((contexts[1], {"until": texts[1][1], "max_new_tokens": 4}))
    )
    assert alone == texts[1].split(texts[1][1])[0], "one stop text need not be a list"


def test_text_ends_at_the_end_token_and_long_contexts_are_cut(decoder, next_token):
    long = "fed cab" * 4
    wanted = greedy(next_token, CODEC.encode(long)[-LENGTH + 3 :], 3)
    unused = next(token for token in range(decoder.config.vocab_size) if token not in wanted)
    for end in (wanted[0], wanted[-1]):
        model = HarnessModel(decoder, CODEC, LENGTH, ends=[unused, end])
        text = CODEC.decode(wanted[: wanted.index(end)])
        assert model.generate_until(requests((long, {"max_gen_toks": 3}))) == [text]


def test_sampled_text_is_the_same_again_and_depends_on_its_settings(model):
    asked = requests(*[("ab", {"do_sample": True, "max_gen_toks": 4, "temperature": 3.0})] * 6)
    drawn = model.generate_until(asked)
    assert model.generate_until(asked) == drawn
    assert len(set(drawn)) > 1, "each request has its own random key"
    (best,) = model.generate_until(requests(("ab", {"max_gen_toks": 4})))
    assert best in model.generate_until(
        requests(("ab", {"do_sample": True, "max_gen_toks": 4, "temperature": 1e-3}))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "a task sets num_beams for generation: choose from do_sample, "),
        ({"max_gen_toks": "many"}, "a task sets max_gen_toks='many' for generation: set a number"),
        (
            {"max_gen_toks": 8},
            "a task asks for max_gen_toks=8, but the model reads 8 tokens: set it from 1 to 7",
        ),
        ({"max_gen_toks": 0}, "a task asks for max_gen_toks=0"),
        ({"do_sample": True, "temperature": -1}, "generate.temperature must be at least 0"),
    ],
)
def test_wrong_settings_are_one_line(model, settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        model.generate_until(requests(("ab", settings)))


def test_what_does_not_fit_is_one_line(model):
    with pytest.raises(
        ConfigError, match=r"^a continuation has 9 tokens, but the model reads 8: 'aaaaaaaaa'; ask"
    ):
        model.loglikelihood(requests(("b", "a" * 9)))
    with pytest.raises(
        ConfigError, match=r"^windows of 9 tokens are too long, because position 8 is outside"
    ):
        HarnessModel(create("learned", length=8), CODEC, 9)
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        HarnessModel(create(), CODEC, 8, batch_size=0)
    broken = create()
    nnx.update(broken, jax.tree.map(lambda x: x * np.float32(np.nan), nnx.state(broken, nnx.Param)))
    with pytest.raises(ConfigError, match="a likelihood is not finite"):
        HarnessModel(broken, CODEC, 8).loglikelihood(requests(("a", "b")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on documents of the built-in sample."""
    folder = tmp_path_factory.mktemp("harness") / "run"
    settings = config_files.experiment(
        "text",
        {"tokenizer": "bytes", "length": 32, "packing": "documents"},
        model={"num_layers": 1, "block": BLOCK},
        encoding="rope",
        evaluation={"examples": 40, "batch_size": 8},
        job={"mesh": {"data": 1}},
    )
    write_run(
        folder, ExperimentConfig.from_mapping(settings.to_dict()), seeds=(0, 1), perplexity=9.0
    )
    return folder


@pytest.mark.slow
def test_a_run_gives_the_likelihoods_of_its_perplexity(run, seed=1):
    """Of complete documents: windows that are longer than each of them."""
    loaded = load_run(run)
    task = loaded.task
    (entries,) = task.token_streams("test")
    texts = [
        task.decode(entries.tokens[start + 1 : end + 1][entries.counted[start:end]])
        for start, end in itertools.pairwise(entries.bounds)
    ]
    longest = int(np.diff(entries.bounds).max())
    likelihoods = harness_model.load(run, seed, longest).loglikelihood_rolling(
        requests(*((text,) for text in texts))
    )
    wanted = perplexity_report.read(loaded.model(seed), task, "test", longest, longest, longest, 2)
    # Sums of hundreds of float32 losses, in rows of other widths.
    assert sum(likelihoods) == pytest.approx(-wanted.nats.sum(), rel=1e-6)


def test_only_a_decoder_of_text_is_taken():
    with pytest.raises(
        ConfigError, match=r"^counting holds a decoder on counting: choose a decoder of text$"
    ):
        harness_model.load("counting")
    assert harness_model.load("shakespeare", batch_size=2).length == 256


@pytest.mark.slow
def test_the_harness_takes_the_adapter(run, tmp_path):
    """With the harness' own tasks, of a file on this disk."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows

    for size in range(30):
        theirs = list(get_rolling_token_windows(list(range(size)), -1, LENGTH, 1))
        ours = harness_model._windows(np.arange(-1, size), LENGTH)
        assert [(tokens[:-1].tolist(), count) for tokens, count in ours if count] == [
            (inputs, len(wanted)) for inputs, wanted in theirs
        ]
    documents = [{"text": "The lamp is bright.", "choices": [" dark", " lit"], "answer": 1}] * 3
    data = tmp_path / "data.json"
    data.write_text("\n".join(map(json.dumps, documents)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    choice = {
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
    }
    tasks = [
        {"task": "choice", "output_type": "multiple_choice", **source, **choice},
        {
            "task": "rolling",
            "output_type": "loglikelihood_rolling",
            **source,
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        },
    ]
    model = harness_model.load(run)
    lm = harness_model.as_lm(model)
    assert isinstance(lm, LM)
    evaluated = lm_eval.simple_evaluate(model=lm, tasks=tasks, bootstrap_iters=0, log_samples=True)
    asked = [(documents[0]["text"], text) for text in documents[0]["choices"]]
    (dark, _), (lit, _) = model.loglikelihood(requests(*asked))
    assert evaluated["results"]["choice"]["acc,none"] == float(lit > dark)
    assert [value for ((value, _),) in evaluated["samples"]["choice"][2]["resps"]] == pytest.approx(
        [dark, lit], abs=ROUNDING
    )
    (whole,) = model.loglikelihood_rolling(requests((documents[0]["text"],)))
    words = len(documents[0]["text"].split())
    assert evaluated["results"]["rolling"]["word_perplexity,none"] == pytest.approx(
        np.exp(-whole / words), rel=1e-5
    )
