"""Decoders of transformers with another encoding: they start equal, train, generate and are saved."""

import copy
import json

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from cope_jax.errors import ConfigError  # noqa: E402
from cope_jax.torch import add_positions, decoder_attention, from_pretrained  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("torch_decoders")]

SMALL = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
SMALL |= {"max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Before version 5 only eager attention had this option.
SCALED = {"scale_attn_by_inverse_layer_idx": int(transformers.__version__[0]) > 4}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**SMALL, **NO_DROPOUT, **SCALED),
    "llama": lambda: transformers.LlamaConfig(**GROUPED, head_dim=12),
    "qwen2": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=5),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=48),
}


def every_decoder(*few):
    """Runs a test with each decoder, slow unless it is one of a few."""
    marked = [pytest.param(x, marks=[] if x in few else [pytest.mark.slow]) for x in CONFIGS]
    return pytest.mark.parametrize("name", marked)


def plain(name):
    """A random decoder in float64, with transformers' eager attention."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():  # larger than initial ones, so that attention matters
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def trained(name, encoding="cope", **options):
    """The same decoder with an encoding whose parameters are random."""
    model = add_positions(plain(name), encoding, **options)
    for path, parameter in model.named_parameters():
        if ".positions." in path:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Programs for a few tokens, which are compiled faster than those for 64."""
    monkeypatch.setattr(decoder_attention, "SMALLEST", 16)


def padded_tokens(length=9):
    """Two sequences; the second has three tokens of padding on the left."""
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (2, length))
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def same(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@every_decoder("gpt2", "mistral")
def test_logits_start_as_those_of_transformers(name):
    model, given = plain(name), padded_tokens()
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        eager = model(given["input_ids"]).logits
        model.set_attn_implementation("sdpa")
        before = [model(**given).logits[seen], model(given["input_ids"]).logits]
        model = add_positions(model, "cope", npos_max=8)
        after = [model(**given).logits[seen], model(given["input_ids"]).logits]
    same(after, before)
    # Most models round the weights of eager attention to float32; padded rows are NaN there.
    same(after[1], eager, atol=1e-10 if name == "gpt2" else 1e-5)
    loss = model(**given, labels=given["input_ids"]).loss
    loss.backward()
    tables = [x for path, x in model.named_parameters() if path.endswith("positions.table")]
    assert len(tables) == 2 and all(table.grad.abs().max() > 0 for table in tables)


@every_decoder("llama")
def test_a_cache_and_padding_change_nothing(name):
    model, given = trained(name, npos_max=8), padded_tokens()
    seen = given["attention_mask"].bool()

    def logits(rows=slice(None), begin=0, end=9, **options):
        mask = given["attention_mask"][rows]
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        ids = given["input_ids"][rows, begin:end]
        first = 0 if options else begin
        mask = mask[:, first:end]
        return model(ids, attention_mask=mask, position_ids=places, **options).logits

    with torch.no_grad():
        whole = logits()
        same(logits(slice(1, 2), begin=3), whole[1:, 3:])
        cache = transformers.DynamicCache(config=model.config)
        steps = [
            logits(begin=begin, end=end, past_key_values=cache, use_cache=True)
            for begin, end in ((0, 5), (5, 6), (6, 9))
        ]
        same(torch.cat(steps, 1)[seen], whole[seen])


@pytest.mark.parametrize("padding", [0, 3])
def test_a_cache_of_the_window_keeps_true_positions(padding):
    model = trained("mistral", "fire", threshold=2.0)
    ids = torch.randint(3, 50, (1, 14))
    mask = (torch.arange(14) >= padding)[None].long()

    def logits(begin, end, **options):
        given = {"attention_mask": mask[:, :end], "position_ids": mask.cumsum(1)[:, begin:end]}
        return model(ids[:, begin:end], **given, **options).logits

    with torch.no_grad():
        whole = logits(0, 14, use_cache=False)
        cache = transformers.DynamicCache(config=model.config)
        steps = [
            logits(begin, end, past_key_values=cache)
            for begin, end in ((0, 8), (8, 10), *((n, n + 1) for n in range(10, 14)))
        ]
    # Mistral's norms round to float32.
    same(torch.cat(steps, 1)[:, padding:], whole[:, padding:], atol=1e-5)


@pytest.mark.parametrize(
    ("encoding", "name", "static", "message"),
    [
        ("ssmax", "mistral", False, "reads all earlier tokens, but the cache keeps only"),
        ("fire", "mistral", True, "reads true positions, but the cache keeps only"),
        ("selective", "llama", False, "reads earlier queries, which the cache does not keep"),
    ],
)
def test_what_a_cache_does_not_keep_is_refused(encoding, name, static, message):
    model = trained(name, encoding)
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    if static:
        options |= {"cache_implementation": "static", "disable_compile": True}
    ids = torch.randint(3, 50, (1, 9))
    with pytest.raises(ConfigError, match=f"{message}.*use_cache=False"):
        model.generate(ids, **options)


@every_decoder("gpt2")
def test_generation_with_a_cache_is_generation_without(name):
    model, given = trained(name, npos_max=8), padded_tokens()
    for options in ({}, {"num_beams": 3}):
        options |= {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        cached = model.generate(**given, **options)
        assert cached.tolist() == model.generate(**given, **options, use_cache=False).tolist()
        if "num_beams" not in options:
            static = {"cache_implementation": "static", "disable_compile": True}
            assert cached.tolist() == model.generate(**given, **options, **static).tolist()
        alone = model.generate(given["input_ids"][1:, 3:], **options)
        assert cached[1, 3:].tolist() == alone[0].tolist()


@pytest.mark.parametrize("name", ["gpt2"])
def test_a_saved_model_is_read_back(name, tmp_path):
    model, given = trained(name, "cope", npos_max=8), padded_tokens()
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(loaded) is type(model)
    with torch.no_grad():
        same(loaded(**given).logits, model(**given).logits, atol=1e-12)
    again, report = from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model) and not report["missing_keys"]


def test_packed_documents_do_not_see_each_other():
    model = trained("llama", npos_max=8)
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (1, 9))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        same(packed[:, 4:], model(ids[:, 4:]).logits)


@pytest.mark.filterwarnings("ignore:.* does not start at 0")
@pytest.mark.parametrize("name", ["ssmax", "selective_rope", "darope"])
def test_an_encoding_that_reads_hidden_tokens_refuses_their_mask(name):
    model = add_positions(plain("llama"), name)
    places = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ConfigError, match="reads tokens that a mask of four axes hides: pass"):
        model(torch.ones(1, 5, dtype=torch.long), position_ids=places, use_cache=False)


def test_checkpoints_of_layers_change_no_gradient():
    model, given = trained("llama", npos_max=8).train(), padded_tokens()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
        model.gradient_checkpointing_enable()
    same(*gradients)


def test_dropout_of_attention_is_kept():
    model, given = trained("gpt2", npos_max=8), padded_tokens()
    layer = model.transformer.h[0].attn
    with torch.no_grad():
        expected = model(**given).logits
        layer.attn_dropout.p = 0.5
        same(model(**given).logits, expected)
        assert (model.train()(**given).logits - expected).abs().max() > 1e-3


def test_an_encoding_that_reads_the_input_runs_without_a_cache():
    with pytest.warns(UserWarning, match="fox does not start at 0, so the model's logits change"):
        model = add_positions(plain("llama"), "fox")
    given = padded_tokens()
    ids = given["input_ids"][1:, 3:]
    with torch.no_grad():
        # Llama's norms round to float32.
        same(model(**given).logits[1:, 3:], model(ids).logits, atol=1e-5)
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    model.generate(ids, **options, use_cache=False)
    with pytest.raises(ConfigError, match=r"reads the input of the layer.* use_cache=False"):
        model.generate(ids, **options)
    model(ids).logits.sum().backward()
    copy.deepcopy(model)  # no layer keeps its input, which has a graph
    model.set_attn_implementation("sdpa")
    model(ids)
    copy.deepcopy(model)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=48))


WRONG = {
    "no model": (lambda: "gpt2", "cope", "takes a model of transformers, got 'gpt2'"),
    "no interface": (
        lambda: transformers.XLNetModel(
            transformers.XLNetConfig(vocab_size=8, d_model=8, n_layer=1, n_head=1, d_inner=8)
        ),
        "cope",
        "XLNetModel does not use transformers' attention interface",
    ),
    "both sides": (bert, "cope", "BertModel (has attention to later tokens|does not use)"),
    "cross-attention": (
        lambda: transformers.GPT2Model(transformers.GPT2Config(**SMALL, add_cross_attention=True)),
        "cope",
        "GPT2Model has attention to later tokens or to an encoder: add_positions takes decoders",
    ),
    "the input": (lambda: plain("gpt2"), "learned", "learned acts on the input embeddings"),
    "no such encoding": (lambda: plain("gpt2"), "copee", "did you mean 'cope'"),
    "twice": (lambda: trained("gpt2"), "cope", "has other positions already"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name):
    create, encoding, message = WRONG[name]
    model = create()
    with pytest.raises(ConfigError, match=message) as error:
        add_positions(model, encoding)
    assert "\n" not in str(error.value)


def test_masks_of_numbers_and_sizes_are_one_line():
    with pytest.raises(ConfigError, match="num_heads is that of the model: leave it out"):
        add_positions(plain("gpt2"), "cope", num_heads=4)
    seen = torch.ones(1, 1, 5, 5).tril()
    with pytest.raises(ConfigError, match=r"a mask of four axes must be boolean.*pass mask == 0"):
        trained("gpt2")(torch.ones(1, 5, dtype=int), attention_mask=(1 - seen.double()) * -1e9)


def test_a_model_without_positions_is_not_read(tmp_path):
    plain("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no positions of add_positions: load it with"):
        from_pretrained(tmp_path)
    trained("gpt2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for names in (None, ["GPT3"], ["logging"], ["PreTrainedModel"], [], "GPT2LMHeadModel "):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
        with pytest.raises(ConfigError, match="which is no model of transformers"):
            from_pretrained(tmp_path)
    for entry in ({}, [], 5, "x", {"parts": 5}, {"parts": []}, {"parts": [["cope"]]},
                  {"parts": [[1, 2]]}, {"parts": [["cope", 5]]}, {"parts": [5]}):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config | {"cope_jax": entry}))
        with pytest.raises(ConfigError, match=r"^the entry 'cope_jax' in config.json of .* is dam"):
            from_pretrained(tmp_path)


def test_the_trainer_trains_and_continues(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    torch.manual_seed(0)
    model = add_positions(plain("gpt2").float(), "cope", npos_max=8)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 50, (16, 12))]

    def trainer(steps):
        arguments = transformers.TrainingArguments(
            tmp_path,
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            learning_rate=1e-2,
        )
        return transformers.Trainer(model, arguments, train_dataset=rows)

    trainer(4).train()
    table = model.transformer.h[0].attn.positions.table
    assert table.abs().max() > 0
    loaded = from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(loaded.transformer.h[0].attn.positions.table, table)
    trainer(6).train(resume_from_checkpoint=True)
