"""Generated tokens: the most probable, the distribution of drawn ones, ends of rows, mistakes."""

import functools
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError, NonFiniteError
from cope_jax.generation import decoding, sampling
from cope_jax.generation.decoding import generate, generate_stream
from cope_jax.generation.sampling import keep_top_k, keep_top_p, row_keys
from cope_jax.models.decoder import Decoder
from tests.models.cases import LENGTH, VOCAB, build, config, model

KEY = jax.random.key(0)
sample = jax.jit(sampling.sample, static_argnames="top_k")
PROMPTS = [[1, 2, 3], [4], [5, 6]]


class Counter(nnx.Module):
    """Stands for a model: after token t it finds t + 1 most probable. Notes each step."""

    config = SimpleNamespace(vocab_size=12, block=SimpleNamespace(model_dim=4))
    encoding = SimpleNamespace(embed=lambda x_BLD, positions_BL: x_BLD)
    steps: ClassVar[list[None]] = []

    def prefill(self, tokens_BL, capacity, *, lengths_B):
        return self._logits(tokens_BL), jnp.zeros(capacity)

    def decode(self, tokens_BL, cache):
        jax.debug.callback(lambda: self.steps.append(None))
        return self._logits(tokens_BL), cache

    def _logits(self, tokens_BL):
        return 5 * jax.nn.one_hot(tokens_BL[:, -1] + 1, self.config.vocab_size)


class Breaking(Counter):
    """After token 7 no logit is finite."""

    def _logits(self, tokens_BL):
        return jnp.where(tokens_BL[:, -1:] == 7, jnp.nan, super()._logits(tokens_BL))


@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize("stop", [None, 11])
def test_logits_that_are_not_finite_are_no_tokens(temperature, stop):
    options = {"key": KEY, "temperature": temperature, "stop_token": stop}
    message = r"^the logits of new token 3 of row 1 of the batch are not finite: look for"
    with pytest.raises(NonFiniteError, match=message):
        generate(Breaking(), [[1], [5]], 6, **options)
    parts = generate_stream(Breaking(), [[1], [5]], 6, chunk=1, **options)
    assert [[row.tolist() for row in next(parts)] for _ in range(2)] == [[[2], [6]], [[3], [7]]]
    with pytest.raises(NonFiniteError, match=message):
        next(parts)


@pytest.mark.newest
def test_greedy_tokens_are_those_of_the_full_pass():
    """Each row as if it were alone, whatever the temperature's other options say."""
    decoder = model(config("learned+cope(npos_max=4)+rope", max_length=12))
    graph, state = nnx.split(decoder)
    forward = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    rows = np.zeros((3, 12), np.int32)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    for step in range(6):
        best = np.argmax(forward(state, rows), axis=-1)
        for row, prompt, token in zip(rows, PROMPTS, best, strict=True):
            row[len(prompt) + step] = token[len(prompt) + step - 1]
    generated = generate(decoder, PROMPTS, 6, key=KEY, temperature=0.0, top_k=5, top_p=0.9)
    for row, prompt, new in zip(rows, PROMPTS, generated, strict=True):
        assert new.dtype == np.int32
        np.testing.assert_array_equal(new, row[len(prompt) : len(prompt) + 6])
    assert len({tuple(new) for new in generated}) == 3, "rows that do not differ say nothing"


def test_tokens_depend_on_the_key_alone():
    decoder = model(config("rope", num_layers=1))
    first, again, other = (
        generate(decoder, PROMPTS, 20, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    same = generate(decoder, [[1, 2]] * 2, 20, key=KEY)
    assert not np.array_equal(*same), "rows are drawn apart"
    (row,) = generate(Counter(), [[1]], 20, key=KEY, temperature=1e6)
    assert len(set(row.tolist())) > 6, "each step is drawn anew"
    rows = generate(Counter(), [[1]] * 20, 2, key=KEY, temperature=1e6)
    assert len({tuple(row) for row in rows}) > 12, "the first and the second too"


@pytest.mark.slow
def test_a_row_is_drawn_alike_whatever_stands_beside_it():
    """With its key; prompts of equal length, so that even the logits are bit-identical."""
    decoder, prompts = model(config("rope", num_layers=1)), [[1, 2], [3, 4], [5, 6], [1, 2]]
    whole = generate(decoder, prompts, 20, key=KEY, top_k=9)
    assert len({tuple(row) for row in whole}) == 4
    for rows in ([0], [3, 1], [2, 0, 3]):
        generated = generate(
            decoder, [prompts[row] for row in rows], 20, key=row_keys(KEY, rows), top_k=9
        )
        np.testing.assert_array_equal(generated, [whole[row] for row in rows])


def test_rows_end_with_the_stop_token_and_the_program_with_the_last_row():
    Counter.steps.clear()
    generated = generate(Counter(), [[1], [4, 3], [0]], 9, key=KEY, temperature=0.0, stop_token=5)
    assert [row.tolist() for row in generated] == [[2, 3, 4, 5], [4, 5], [1, 2, 3, 4, 5]]
    jax.effects_barrier()
    assert len(Counter.steps) == 4  # the first token comes from the prompt
    generated = generate(Counter(), [[1], [4, 3], [0]], 3, key=KEY, temperature=0.0, stop_token=5)
    assert [row.tolist() for row in generated] == [[2, 3, 4], [4, 5], [1, 2, 3]]
    generated = generate(Counter(), [[9]], 1, key=KEY, temperature=0.0)
    assert [row.tolist() for row in generated] == [[10]]


@pytest.mark.slow
def test_padded_prompts_of_several_lengths_need_one_compilation():
    decoder = model(config("learned", num_layers=1, max_length=9))
    options = dict(key=KEY, temperature=0.0)
    alone = [generate(decoder, [prompt], 3, **options)[0].tolist() for prompt in ([1, 2], [4])]
    before = decoding._generate._cache_size()
    padded = [
        generate(decoder, [prompt], 3, padded=6, **options)[0].tolist() for prompt in ([1, 2], [4])
    ]
    assert padded == alone
    assert decoding._generate._cache_size() == before + 1


@pytest.mark.parametrize("stops", [[7, 3], (3, 7), np.array([7, 3])])
def test_each_of_several_stop_tokens_ends_a_row(stops):
    options = dict(key=KEY, temperature=0.0, stop_token=stops)
    expected = [[2, 3], [5, 6, 7], [8, 9, 10]]
    assert [row.tolist() for row in generate(Counter(), [[1], [4], [7]], 3, **options)] == expected
    assert [
        row.tolist() for row in joined(generate_stream(Counter(), [[1], [4], [7]], 3, **options))
    ] == expected


def joined(parts):
    return [np.concatenate(row) for row in zip(*parts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_a_stream_gives_the_tokens_of_generate(chunk):
    decoder = model(config("cope(npos_max=4)+rope", num_layers=1))
    options = dict(key=KEY, temperature=1.3, top_k=8, top_p=0.95, stop_token=3)
    expected = generate(decoder, PROMPTS, 20, **options)
    parts = list(generate_stream(decoder, PROMPTS, 20, chunk=chunk, **options))
    for row, new in zip(joined(parts), expected, strict=True):
        np.testing.assert_array_equal(row, new)
    assert [len(row) for row in parts[0]] == [1, 1, 1]
    assert all(len(row) <= chunk for chunk_rows in parts for row in chunk_rows)
    assert len({len(row) for row in expected}) > 1, (
        "rows that end together say nothing of rows that do not"
    )


def test_a_stream_ends_with_the_last_row_and_draws_no_more_than_what_was_looked_at():
    Counter.steps.clear()
    parts = generate_stream(
        Counter(), [[1], [4, 3], [0]], 9, key=KEY, temperature=0.0, stop_token=5, chunk=2
    )
    assert [row.tolist() for row in next(parts)] == [[2], [4], [1]]
    jax.effects_barrier()
    assert len(Counter.steps) == 0
    assert [row.tolist() for row in next(parts)] == [[3, 4], [5], [2, 3]]
    assert [row.tolist() for row in next(parts)] == [[5], [], [4, 5]]
    assert list(parts) == []
    jax.effects_barrier()
    assert len(Counter.steps) == 4


def test_a_streams_mistakes_are_told_at_once():
    with pytest.raises(ConfigError, match=r"^generate_stream\.chunk must be at least 1, got 0$"):
        generate_stream(Counter(), [[1]], 3, key=KEY, chunk=0)
    with pytest.raises(ConfigError, match=r"^a prompt is empty"):
        generate_stream(Counter(), [[]], 3, key=KEY)


class Noted(Decoder):
    """Notes each trace."""

    traces: ClassVar[list[tuple[int, ...]]] = []

    def prefill(self, tokens_BL, capacity, *, lengths_B):
        self.traces.append(tokens_BL.shape)
        return super().prefill(tokens_BL, capacity, lengths_B=lengths_B)


@pytest.mark.slow
def test_what_changes_from_call_to_call_does_not_compile_again():
    for seed, temperature, top_p, stop_token in [
        (0, 1.0, 0.5, 3),
        (1, 0.7, 0.9, None),
        (2, 0.0, 1.0, 0),
    ]:
        decoder = Noted(config("cope(npos_max=4)", num_layers=1), rngs=nnx.Rngs(seed))
        options = {"temperature": temperature, "top_p": top_p, "stop_token": stop_token}
        generate(decoder, [[1, 2], [3]], 5, key=jax.random.key(seed), **options)
    assert Noted.traces == [(2, 2)]
    generate(decoder, [[1, 2, 3], [3]], 5, key=KEY, top_p=0.5)
    assert Noted.traces == [(2, 2), (2, 3)]
    for chunk in (1, 4):
        list(generate_stream(decoder, [[1, 2], [3]], 5, key=KEY, chunk=chunk))
    assert Noted.traces == [(2, 2), (2, 3), (2, 2)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_tokens_follow_the_softmax(temperature):
    draws, logits = 20_000, np.array([0.0, 1.0, -1.0, 2.0, 0.5], np.float32)
    drawn = sample(jnp.broadcast_to(logits, (draws, 5)), KEY, jnp.float32(temperature), None, None)
    shares = np.bincount(drawn, minlength=5) / draws
    chances = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert np.all(np.abs(shares - chances) < 5 * (chances * (1 - chances) / draws) ** 0.5)


def test_filters_apply_together_after_the_temperature():
    """Of 0.4, 0.3, 0.2, 0.1, three are kept: 0.44, 0.33, 0.22, of which the first two reach 0.7."""
    draws, logits = 4_000, np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    many = jnp.broadcast_to(logits, (draws, 4))

    def shares(temperature, top_k, top_p):
        drawn = sample(many * temperature, KEY, jnp.float32(temperature), top_k, top_p)
        return np.bincount(drawn, minlength=4) / draws

    np.testing.assert_allclose(shares(1.0, 3, 0.7), [0, 4 / 7, 3 / 7, 0], atol=0.05)
    np.testing.assert_allclose(shares(3.0, 3, 0.7), [0, 4 / 7, 3 / 7, 0], atol=0.05)
    np.testing.assert_allclose(shares(1.0, None, 0.71), [0, 4 / 9, 3 / 9, 2 / 9], atol=0.05)
    np.testing.assert_allclose(shares(1.0, 3, 0.71), [0, 4 / 7, 3 / 7, 0], atol=0.05)


def test_temperature_zero_takes_the_first_of_the_most_probable():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    drawn = jax.jit(functools.partial(sample, top_k=None, top_p=None))(logits, KEY, jnp.float32(0))
    assert drawn.tolist() == [1, 0] and drawn.dtype == jnp.int32


@pytest.mark.parametrize("temperature", [1e-36, 1e-39, 1e-50])
@pytest.mark.parametrize("top_p", [None, 1e-50, 0.5])
def test_a_tiny_temperature_takes_the_most_probable(temperature, top_p):
    logits = jnp.array([[0.0, 900.0, 1000.0, 999.9], [-5.0, -1000.0, -6.0, -5.1]])
    p = None if top_p is None else jnp.float32(top_p)
    assert sample(logits, KEY, jnp.float32(temperature), None, p).tolist() == [2, 0]
    assert sample(logits, KEY, jnp.float32(temperature), 3, p).tolist() == [2, 0]


def kept(logits):
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(logits)]


def test_top_k_keeps_k_and_of_equals_the_first():
    logits = jnp.array([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
    assert kept(keep_top_k(logits, 1)) == [[1], [0], [1]]
    assert kept(keep_top_k(logits, 2)) == [[1, 3], [0, 1], [1, 2]]
    np.testing.assert_array_equal(keep_top_k(logits, 4), logits)
    np.testing.assert_array_equal(keep_top_k(logits, 2)[0, [1, 3]], logits[0, [1, 3]])


def test_top_p_keeps_the_fewest_that_reach_p():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(50, 9)).astype(np.float32)
    for p in (1e-6, 0.3, 0.8, 0.99):
        expected = []
        for row in logits.astype(np.float64):
            chances, chosen = np.exp(row) / np.exp(row).sum(), []
            for token in np.argsort(-row):
                chosen.append(token)
                if chances[chosen].sum() >= p:
                    break
            expected.append(sorted(chosen))
        assert kept(keep_top_p(jnp.asarray(logits), p)) == expected
        assert {len(row) for row in expected} != {9}


def test_top_p_at_its_ends():
    halves = jnp.log(jnp.array([[0.25, 0.25, 0.25, 0.25], [1.0, 1e-30, 1e-30, 1e-30]]))
    assert kept(keep_top_p(halves, 0.5)) == [[0, 1], [0]]
    assert kept(keep_top_p(halves, 0.51)) == [[0, 1, 2], [0]]
    assert kept(keep_top_p(halves, jnp.float32(1e-50))) == [[0], [0]], "p that is rounded to 0"
    np.testing.assert_array_equal(keep_top_p(halves, 1.0), halves)


MISTAKES = {
    "no cache": (
        dict(model=nnx.Linear(1, 1, rngs=nnx.Rngs(0))),
        "generate.model must have prefill and decode, got a Linear: pass a Decoder or an RNNLM",
    ),
    "no model": (dict(model=3), "prefill and decode, got a int: pass cj.load(folder).model()"),
    "a class": (dict(model=Decoder), "generate.model must be a model, got the class Decoder"),
    "no token": (dict(size=0), "generate.size must be at least 1, got 0"),
    "no prompt": (dict(prompts=[]), "a prompt is empty"),
    "empty prompt": (
        dict(prompts=[[1], []]),
        "a prompt is empty: give at least one prompt, and at least one token in each",
    ),
    "token": (
        dict(prompts=[[1, VOCAB]]),
        f"prompt: token {VOCAB} is outside of the vocabulary of {VOCAB}",
    ),
    "negative token": (dict(prompts=[[-1]]), "prompt: token -1 is outside"),
    "stop token": (dict(stop_token=VOCAB), f"stop_token: token {VOCAB} is outside"),
    "negative stop token": (dict(stop_token=-1), "stop_token: token -1 is outside"),
    "one prompt": (
        dict(prompts=[1, 2, 3]),
        "prompts must be a list of lists of integers, got the prompt 1",
    ),
    "text": (dict(prompts="abc"), "prompts must be a list of lists of integers, got 'abc'"),
    "texts": (
        dict(prompts=["abc"]),
        "prompts must be a list of lists of integers, got the prompt 'abc'",
    ),
    "number": (dict(prompts=3), "prompts must be a list of lists of integers, got 3"),
    "ragged": (
        dict(prompts=[[1, [2]]]),
        "prompts must be a list of lists of integers, got the prompt [1, [2]]",
    ),
    "nested": (
        dict(prompts=np.zeros((1, 2, 2), int)),
        "integers, got the prompt numpy int64[2, 2]",
    ),
    "fraction": (
        dict(prompts=[[1.7]]),
        "prompts must be a list of lists of integers, got the prompt [1.7]",
    ),
    "no prompts": (dict(prompts=np.array(5)), "prompts must be a list of lists of integers, got"),
    "booleans": (
        dict(prompts=[[3, True]]),
        "prompt: tokens must be a list of integers, got [3, True]",
    ),
    "nested stops": (dict(stop_token=[[1], [2, 3]]), "generate.stop_token must be int, got [1]"),
    "huge token": (
        dict(prompts=[[2**40]]),
        f"prompt: token {2**40} is outside of the vocabulary of {VOCAB}",
    ),
    "a wrong one of several stops": (
        dict(stop_token=[1, VOCAB]),
        f"stop_token: token {VOCAB} is outside",
    ),
    "text among stops": (
        dict(stop_token=[1, "2"]),
        "generate.stop_token must be int, got '2' of type str",
    ),
    "fractional stop": (
        dict(stop_token=1.5),
        "generate.stop_token must be int, got 1.5 of type float",
    ),
    "fractional length": (
        dict(max_new_tokens=1.5),
        "generate.max_new_tokens must be int, got 1.5 of type float",
    ),
    "bool": (
        dict(max_new_tokens=True),
        "generate.max_new_tokens must be int, got True of type bool",
    ),
    "fractional top_k": (
        dict(top_k=2.0),
        "generate.top_k must be int or None, got 2.0 of type float",
    ),
    "infinite": (dict(temperature=float("inf")), "generate.temperature must be finite, got inf"),
    "nearly infinite": (
        dict(temperature=1e39),
        "generate.temperature must be finite in float32, got 1e+39",
    ),
    "no new token": (dict(max_new_tokens=0), "generate.max_new_tokens must be at least 1, got 0"),
    "temperature": (dict(temperature=-0.1), "generate.temperature must be at least 0, got -0.1"),
    "no temperature": (
        dict(temperature=float("nan")),
        "generate.temperature must be finite, got nan",
    ),
    "top_k": (dict(top_k=0), "generate.top_k must be at least 1, got 0"),
    "top_p": (dict(top_p=0.0), "generate.top_p must lie in (0, 1], got 0.0"),
    "large top_p": (dict(top_p=1.1), "generate.top_p must lie in (0, 1], got 1.1"),
    "keys": (
        dict(key=row_keys(KEY, range(3))),
        "generate.key must be a key from jax.random.key, or one for each row, 2 in all",
    ),
    "old key": (dict(key=jax.random.PRNGKey(0)), "generate.key must be a key from jax.random.key"),
    "table": (
        dict(max_new_tokens=LENGTH),
        f"position {LENGTH} is outside of the learned table of {LENGTH} rows",
    ),
}


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    arguments = (
        dict(model=model(config("learned")), prompts=[[1, 2], [3]], max_new_tokens=1, key=KEY)
        | change
    )
    with pytest.raises(ConfigError) as error:
        generate(**arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_only_tokens_of_the_tokenizer_are_drawn(temperature):
    arguments = (model(config("learned")), [[1, 2], [3]], 4)
    choices = {"key": KEY, "temperature": temperature, "top_k": VOCAB}
    some = generate(*arguments, size=3, **choices)
    assert max(map(max, some)) < 3 <= max(map(max, generate(*arguments, **choices)))
    beyond = generate(*arguments, size=VOCAB + 9, **choices)
    np.testing.assert_array_equal(beyond, generate(*arguments, **choices))
    ended = generate(*arguments, size=1, stop_token=VOCAB - 1, key=KEY, temperature=1e6)
    assert {int(token) for row in ended for token in row} == {0, VOCAB - 1}


def test_the_whole_table_can_be_used_and_a_large_top_k_keeps_all():
    """The last token has no position, for it is never read; the tokens before it fill the table."""
    graph, state = build(config("learned", num_layers=1))
    (row,) = generate(
        nnx.merge(graph, state), [[1, 2]], LENGTH - 1, key=KEY, temperature=1e-3, top_k=VOCAB + 5
    )
    read = np.array([[1, 2, *row[:-1]]], np.int32)
    assert read.shape == (1, LENGTH)
    logits = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, read)
    np.testing.assert_array_equal(row, np.argmax(logits[0, 1:], axis=-1))
