import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.embedders import embed, occurrence_vectors
from cope_jax.evaluation.contextual.word2vec import ContextFree, ContextMean
from cope_jax.models.bert import Bert, BertConfig, BertEmbedder
from cope_jax.models.elmo import Elmo, ElmoConfig, ElmoEmbedder
from cope_jax.models.embedder import ModelEmbedder, overlapping, pool, whole
from cope_jax.models.encoder import bert_block
from cope_jax.models.rnn_lm import RNNLM, RnnEmbedder, RNNLMConfig
from cope_jax.tokenizers.characters import batch_sentences
from cope_jax.tokenizers.word_level import Vocabulary
from cope_jax.tokenizers.wordpiece import WordPiece

SENTENCES = [
    text.split()
    for text in ("a play", "they play it again and again", "the", "a bad play by a good actor")
]
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"play the a it by good bad ##ing ##ed ##s and".split(),
]


def create(model, config):
    """In one program, which is faster than one for each operation."""
    return nnx.jit(lambda: model(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def rnn():
    vocabulary = Vocabulary.build(word for sentence in SENTENCES[:2] for word in sentence)
    config = RNNLMConfig(
        vocab_size=len(vocabulary), embed_dim=3, hidden_dim=4, num_layers=1, bidirectional=True
    )
    return create(RNNLM, config), vocabulary


@pytest.fixture(scope="module")
def elmo():
    sizes = {"filters": ((1, 4), (2, 4)), "cell_dim": 8, "projection_dim": 4, "num_highways": 1}
    return create(Elmo, ElmoConfig(vocab_size=0, max_characters=8, num_layers=2, **sizes))


@pytest.fixture(scope="module")
def bert():
    config = BertConfig(vocab_size=len(PIECES), max_length=12, num_layers=2, block=bert_block(8, 2))
    model = create(Bert, config)
    return model, WordPiece(PIECES), nnx.jit(lambda model, rows: model.layers(rows))


class Places(ModelEmbedder):
    """A model with vectors (row[i], n) at place i of a row of length n; keeps the shapes seen."""

    def __init__(self, **options):
        super().__init__("places", ("one",), **options)
        self.shapes = []

    def windows(self, sentence):
        return [whole(np.array([len(word) for word in sentence], np.int32))]

    def forward(self, rows_BL, lengths_B):
        self.shapes.append(rows_BL.shape)
        assert (lengths_B > 0).all()
        return np.stack([rows_BL, np.broadcast_to(lengths_B[:, None], rows_BL.shape)], axis=-1)[
            None
        ]


def test_a_context_free_vector_is_the_same_in_every_sentence():
    embedder = ContextFree(
        {"play": np.array([1.0, 2.0]), "Play": np.array([3.0, 4.0]), "a": np.array([5.0, 6.0])}
    )
    first, second = embedder([["a", "play"], ["Play", "PLAY", "nothing"]])
    assert first.dtype == np.float32 and first.shape == (1, 2, 2) and embedder.layers == ("static",)
    np.testing.assert_array_equal(first, [[[5, 6], [1, 2]]])
    # As written, in lower case, unknown.
    np.testing.assert_array_equal(second, [[[3, 4], [1, 2], [0, 0]]])


def test_rnn_vectors_are_the_states_of_each_sentence_alone(rnn):
    model, vocabulary = rnn
    embedder = RnnEmbedder(model, vocabulary, lengths=(8,))
    vectors_of = embedder(SENTENCES)
    assert embedder.layers == ("embeddings", "layer 1") and vectors_of[0].dtype == np.float32
    states = nnx.jit(lambda model, tokens: model.states(tokens))
    for sentence, vectors in list(zip(SENTENCES, vectors_of, strict=True))[:2]:
        expected = states(model, jnp.asarray(vocabulary.encode(sentence))[None])[:, 0]
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
    assert [vectors.shape for vectors in vectors_of] == [
        (2, len(sentence), 8) for sentence in SENTENCES
    ]


def test_elmo_vectors_are_those_between_the_marks(elmo):
    embedder = ElmoEmbedder(elmo, lengths=(16,))
    vectors = embedder(SENTENCES)
    assert embedder.layers == ("words", "layer 1", "layer 2")
    layers = nnx.jit(lambda model, characters: model.layers(characters)[0])
    for number in (0, 3):
        characters, _ = batch_sentences([SENTENCES[number]], 8)
        np.testing.assert_allclose(vectors[number], layers(elmo, characters)[:, 0, 1:-1], atol=2e-5)
    first, second = (vectors[number][:, SENTENCES[number].index("play")] for number in (0, 1))
    np.testing.assert_allclose(first[0], second[0], atol=2e-5)  # the word alone
    assert np.abs(first[1:] - second[1:]).max(axis=1).min() > 1e-3  # the word in its sentence


def test_bert_vectors_are_of_the_first_piece_or_the_mean_of_all(bert):
    model, tokenizer, layers_of = bert
    sentences = [["the", "plays"], ["playing", "a", "played", "it"], ["\u200b", "bad"]]
    by_pooling = {
        pooling: BertEmbedder(model, tokenizer, pooling=pooling, lengths=())
        for pooling in ("first", "mean")
    }
    assert by_pooling["mean"].layers == ("embeddings", "layer 1", "layer 2")
    vectors = {pooling: embedder(sentences) for pooling, embedder in by_pooling.items()}
    for number, sentence in enumerate(sentences):
        row, spans = [tokenizer.cls], []
        for word in sentence:
            pieces = tokenizer.encode(word) or [tokenizer.unknown]
            spans.append(range(len(row), len(row) + len(pieces)))
            row += pieces
        layers = np.asarray(layers_of(model, jnp.asarray([[*row, tokenizer.sep]])))[:, 0]
        for index, span in enumerate(spans):
            first, mean = (vectors[pooling][number][:, index] for pooling in ("first", "mean"))
            np.testing.assert_allclose(first, layers[:, span[0]], atol=2e-5)
            np.testing.assert_allclose(mean, layers[:, list(span)].mean(axis=1), atol=2e-5)


def test_every_word_of_a_long_sentence_has_the_vector_of_its_window(bert):
    model, tokenizer, layers_of = bert
    rng = np.random.default_rng(0)
    sentence = [str(word) for word in rng.choice(["the", "plays", "played", "a", "playing"], 30)]
    embedder = BertEmbedder(model, tokenizer, lengths=())  # of 12 places: 10 pieces
    (vectors,) = embedder([sentence])
    assert vectors.shape == (3, 30, 8)
    windows = embedder.windows(sentence)
    assert len(windows) > 4 and max(len(window.row) for window in windows) <= 12
    assert sorted(word for window in windows for word in window.words) == list(range(30))
    for window in windows:
        for word, (start, _) in zip(window.words, window.spans, strict=True):
            assert window.row[start] == tokenizer.encode(sentence[word])[0]
    whole_ones = [window for window in windows if len(window.row) == 12]
    layers = np.asarray(layers_of(model, jnp.stack([window.row for window in whole_ones])))
    for number, window in enumerate(whole_ones):
        np.testing.assert_allclose(
            vectors[:, window.words], layers[:, number, window.spans[:, 0]], atol=2e-5
        )


def test_a_word_of_more_pieces_than_a_window_keeps_its_first(bert):
    model, tokenizer, _ = bert
    embedder = BertEmbedder(model, tokenizer, max_length=4, pooling="mean")
    windows = embedder.windows(["a", "play" + "ing" * 5, "the"])
    rows = [tokenizer.decode(window.row) for window in windows]
    assert "[CLS] play ##ing [SEP]" in rows and max(len(window.row) for window in windows) == 4
    assert sorted(word for window in windows for word in window.words) == [0, 1, 2]


def test_windows_overlap_by_half_and_own_each_word_once(rng):
    for _ in range(200):
        room = int(rng.integers(1, 12))
        sizes = [int(size) for size in rng.integers(1, room + 1, rng.integers(1, 40))]
        windows = overlapping(sizes, room)
        assert sorted(word for _, owned in windows for word in owned) == list(range(len(sizes)))
        for words, owned in windows:
            assert sum(sizes[word] for word in words) <= room and set(owned) <= set(words)
    for words, owned in overlapping([1] * 100, 20)[1:-1]:  # a quarter of a window on each side
        assert min(owned) - words.start >= 5 and words.stop - 1 - max(owned) >= 4


def test_pooling_over_spans(rng):
    layers = rng.normal(size=(2, 7, 3)).astype(np.float32)
    spans = np.array([[1, 2], [2, 5], [5, 6]])
    expected = np.stack([layers[:, a:b].mean(axis=1) for a, b in spans], axis=1)
    np.testing.assert_allclose(pool(layers, spans), expected, atol=1e-6)
    np.testing.assert_array_equal(pool(layers, np.array([[3, 4]])), layers[:, 3:4])


def test_batches_have_few_shapes_and_results_their_order(rng):
    sentences = [
        ["x" * int(size) for size in rng.integers(1, 9, length)]
        for length in rng.integers(1, 30, 200)
    ]
    embedder = Places(tokens=64, lengths=(8, 16))
    for sentence, vectors in zip(sentences, embedder(sentences), strict=True):
        np.testing.assert_array_equal(vectors[0, :, 0], [len(word) for word in sentence])
        np.testing.assert_array_equal(vectors[0, :, 1], len(sentence))
    # Beyond the last, its multiples.
    assert {length for _, length in embedder.shapes} == {8, 16, 32}
    assert (
        len(set(embedder.shapes)) <= 6
        and max(rows * length for rows, length in embedder.shapes) <= 64
    )


def test_occurrence_vectors_embed_each_sentence_once():
    seen = []

    class Counted(Places):
        def __call__(self, sentences):
            seen.append(len(sentences))
            return super().__call__(sentences)

    sentences = [["a", "bb"], ["ccc"], ["a", "bb"], ["dddd", "a", "a"]]
    vectors = occurrence_vectors(Counted(), sentences, [1, 0, 0, 2])
    np.testing.assert_array_equal(vectors[:, 0], [[2, 2], [3, 1], [1, 2], [1, 3]])
    assert seen == [3]
    assert [len(vectors[0]) for vectors in embed(Counted(), sentences, chunk=3)] == [
        2,
        1,
        2,
        3,
    ] and seen == [3, 3, 1]
    assert (
        occurrence_vectors(Counted(), sentences, [1, 0, 0, 2], dtype=np.float16).dtype == np.float16
    )


def test_the_mean_of_a_context_knows_its_words_alone(rng):
    vectors = {word: rng.normal(size=4) for word in "abcd"}
    (ours,), (theirs,), (alone,) = (
        ContextMean(vectors)([list("abcd")]),
        ContextMean(vectors)([list("cbda")]),
        (ContextMean(vectors)([["a", "unseen"]])),
    )
    np.testing.assert_allclose(ours[0, 1], theirs[0, 1], rtol=1e-5)  # of another order
    np.testing.assert_allclose(ours[0, 0], np.mean([vectors[w] for w in "bcd"], axis=0), rtol=1e-5)
    assert not alone[0, 0].any() and np.allclose(alone[0, 1], vectors["a"])


def test_wrong_input_is_named(bert):
    model, tokenizer, _ = bert
    embedder = ContextFree({"a": np.ones(2)})
    with pytest.raises(ConfigError, match="sentence 1 is empty"):
        embedder([["a"], []])
    with pytest.raises(ConfigError, match="sentence 0 is text, 'a b': split it"):
        Places()(["a b"])
    with pytest.raises(
        ConfigError, match="occurrence 1 refers to word number 2, but its sentence has only 2 words"
    ):
        occurrence_vectors(embedder, [["a"], ["a", "b"]], [0, 2])
    with pytest.raises(ConfigError, match="no vectors"):
        ContextFree({})
    with pytest.raises(ConfigError, match="lengths must be at least 1, got 0"):
        Places(lengths=())
    with pytest.raises(ConfigError, match="unknown pooling 'last'"):
        BertEmbedder(model, tokenizer, pooling="last")
    with pytest.raises(ConfigError, match=r"BERT.max_length must be at least 3, got 2"):
        BertEmbedder(model, tokenizer, max_length=2)
    with pytest.raises(ConfigError, match=r"no piece '\[PAD\]'"):
        BertEmbedder(model, WordPiece(["[UNK]"]))
