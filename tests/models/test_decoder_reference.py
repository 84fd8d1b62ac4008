"""GPT-2 and Llama, with noisy parameters, against transformers: logits, loss, gradients, files."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from cope_jax.exchange import formats
from cope_jax.models.decoder import Decoder
from cope_jax.ops.losses import cross_entropy
from tests.exchange.exchange_cases import CASES, tensors, tokens, write

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("decoder_reference")]

# Roundings: of float64, and of float32 on logits of size 1 behind some twenty products.
TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
KINDS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def model_of(folder, dtype="float64"):
    """The model of transformers, every parameter of which must come from the folder."""
    kind = KINDS[transformers.AutoConfig.from_pretrained(folder).model_type]
    # Its own softmax in "eager" Llama is float32.
    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return exact(model.eval()) if dtype == "float64" else model.eval()


def exact(model):
    """Computes in float64 what Llama always computes in float32: RMSNorm, and RoPE's angles."""
    if isinstance(model, transformers.LlamaForCausalLM):
        config, body = model.config, model.model
        norms = [body.norm]
        for layer in body.layers:
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for norm in norms:
            norm.forward = functools.partial(
                torch.nn.functional.rms_norm,
                normalized_shape=norm.weight.shape,
                weight=norm.weight,
                eps=config.rms_norm_eps,
            )
        with as_float64():
            inverse = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        assert inverse.dtype == torch.float64

        def rotary(x, position_ids):
            angles = position_ids[..., None].double() * inverse
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos(), angles.sin()

        body.rotary_emb.forward = rotary
    return model


class as_float64:
    """Makes frequencies in float64: transformers asks for `.float()` and `dtype=torch.float`."""

    def __enter__(self):
        self.kept = torch.float, torch.Tensor.float
        torch.float, torch.Tensor.float = torch.float64, torch.Tensor.double

    def __exit__(self, *error):
        torch.float, torch.Tensor.float = self.kept


def ours(dtype, folder):
    """(config, parameters, logits, loss, gradient) of our decoder on what is in the folder."""
    config, params = formats.load(folder)
    config = dataclasses.replace(
        config, block=dataclasses.replace(config.block, compute_dtype=dtype)
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda array: np.asarray(array, dtype), params))

    @jax.jit
    def run(state):
        def loss(state):
            logits_BLV = nnx.merge(graphdef, state)(tokens())
            return cross_entropy(logits_BLV[:, :-1], tokens()[:, 1:]).mean(), logits_BLV

        return jax.value_and_grad(loss, has_aux=True)(state)

    (loss, logits_BLV), gradient = run(state)
    return config, params, np.asarray(logits_BLV), np.asarray(loss), nnx.to_pure_dict(gradient)


def equal(actual, expected, dtype, message=""):
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.asarray(actual).dtype == dtype
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=TOLERANCES[dtype] * scale, err_msg=message
    )


@pytest.mark.parametrize(
    "name, dtype",
    [
        *(
            pytest.param(name, "float64", marks=[pytest.mark.slow] * ("untied" in name))
            for name in CASES
        ),
        pytest.param("gpt2", "float32", marks=pytest.mark.slow),
        pytest.param("llama, tied, biased, stretched", "float32", marks=pytest.mark.slow),
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(name, dtype, tmp_path):
    folder = write(tmp_path / "model", CASES[name], tensors(CASES[name], dtype))
    theirs = model_of(folder, dtype)
    words = torch.tensor(tokens()).long()
    run = theirs(words, labels=words)
    # Its own loss is float32 whatever the type.
    entropy = torch.nn.functional.cross_entropy(
        run.logits[:, :-1].flatten(0, 1), words[:, 1:].flatten()
    )
    np.testing.assert_allclose(run.loss.detach().numpy(), entropy.detach().numpy(), rtol=1e-6)
    entropy.backward()
    gradients = {parameter: value.grad.numpy() for parameter, value in theirs.named_parameters()}
    with jax.enable_x64(dtype == "float64"):
        config, _, logits_BLV, loss, gradient = ours(dtype, folder)
        equal(logits_BLV, run.logits.detach().numpy(), dtype)
        equal(loss, entropy.detach().numpy(), dtype)
        # In the names and shapes of the files.
        formats.save(tmp_path / "gradient", config, gradient, CASES[name]["model_type"])
    of_files = load_file(tmp_path / "gradient" / "model.safetensors")
    assert of_files.keys() == gradients.keys()
    for parameter, expected in gradients.items():
        assert np.abs(expected).max() > 1e-4 or parameter.endswith("k_proj.bias"), (
            f"{parameter} does not matter"
        )
        equal(of_files[parameter], expected, dtype, parameter)


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_what_is_saved(name, tmp_path):
    """Under its names, nothing is missing, unexpected or changed; what it saves is read again."""
    folder = write(tmp_path / "model", CASES[name], tensors(CASES[name]))
    config, params = formats.load(folder)
    formats.save(tmp_path / "ours", config, params, CASES[name]["model_type"])
    words = torch.tensor(tokens()).long()
    with torch.no_grad():
        before, model = model_of(folder)(words).logits, model_of(tmp_path / "ours")
        equal(model(words).logits.numpy(), before.numpy(), "float64")
    model.save_pretrained(tmp_path / "theirs")
    again, loaded = formats.load(tmp_path / "theirs")
    assert again == config
    chex.assert_trees_all_equal(loaded, params)
