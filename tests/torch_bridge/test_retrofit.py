"""CoPE added to a GPT-2 or a Llama learns the same in PyTorch as in our own training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from cope_jax import tasks  # noqa: E402
from cope_jax.encodings import EncodingConfig  # noqa: E402
from cope_jax.exchange import formats  # noqa: E402
from cope_jax.torch import add_positions, decoder_attention  # noqa: E402
from cope_jax.training.experiment_config import OptimizerConfig  # noqa: E402
from cope_jax.training.learner import Learner  # noqa: E402
from cope_jax.training.optimizer import create_optimizer, create_schedule  # noqa: E402
from tests.corpora.data import real  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("torch_retrofit")]
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "gpt2": (transformers.GPT2Config, NO_DROPOUT),
    "llama": (transformers.LlamaConfig, {"intermediate_size": 64, "num_key_value_heads": 2}),
}


def losses_in_torch(folder, optimizer, batches, npos_max):
    """The loss before each step of AdamW."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    add_positions(model, "cope", npos_max=npos_max).train()
    rate = create_schedule(optimizer, len(batches))
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )
    losses = []
    for step, batch in enumerate(batches):
        inputs, targets = (torch.from_numpy(batch[x]).long() for x in ("inputs", "targets"))
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        adamw.param_groups[0]["lr"] = float(rate(step))
        adamw.step()
        losses.append(loss.item())
    tables = [x for name, x in model.named_parameters() if name.endswith("positions.table")]
    assert all(table.abs().max() > 1e-3 for table in tables)
    return losses


def losses_of_ours(folder, optimizer, batches, npos_max):
    """The losses of the package's own training step, started from the same folder."""
    config, params = formats.load(folder)
    positions = [*config.encoding.parts, ("cope", {"npos_max": npos_max})]
    learner = Learner(
        dataclasses.replace(config, encoding=EncodingConfig(tuple(positions))),
        create_optimizer(optimizer, len(batches)),
        create_schedule(optimizer, len(batches)),
        max_position=batches[0]["inputs"].shape[1],
        batch_size=len(batches[0]["inputs"]),
    )
    state = learner.init(0, params)
    stacked = {name: jnp.stack([batch[name] for batch in batches]) for name in batches[0]}
    _, measured = jax.jit(learner.train_steps)(state, stacked)
    return np.asarray(measured["loss"])


def save(name, folder, **sizes):
    """A random model of transformers in a folder."""
    torch.manual_seed(0)
    config, options = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes, **options))
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_twenty_steps(name, tmp_path, monkeypatch):
    monkeypatch.setattr(decoder_attention, "SMALLEST", 16)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}
    save(name, tmp_path, **sizes, max_position_embeddings=32)
    ids = np.random.default_rng(0).integers(0, 64, (20, 4, 33), np.int32)
    ids[:, :, 1::2] = ids[:, :, ::2][:, :, :16]  # something to learn
    batches = [
        {"inputs": x[:, :-1], "targets": x[:, 1:], "weights": np.ones((4, 32), np.float32)}
        for x in ids
    ]
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    ours = losses_of_ours(tmp_path, optimizer, batches, 8)
    theirs = losses_in_torch(tmp_path, optimizer, batches, 8)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3)
    assert ours[-1] < ours[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_three_hundred_steps_on_wikitext(name, tmp_path):
    data = real("wikitext-2")
    save(
        name,
        tmp_path,
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64},
        **{"vocab_size": 2048, "max_position_embeddings": 128},
    )
    text = tasks.create("text", corpus="wikitext-2", vocab_size=2048, length=128, data_dir=data)
    rng = np.random.default_rng(0)
    batches = [text.sample(rng, 16, "train") for _ in range(300)]
    optimizer = OptimizerConfig(learning_rate=3e-4, warmup_steps=30, weight_decay=0.1)
    ours = losses_of_ours(tmp_path, optimizer, batches, 64)
    theirs = losses_in_torch(tmp_path, optimizer, batches, 64)
    print(f"largest difference {np.abs(ours - theirs).max():.2g}; {ours[0]:.3f} to {ours[-1]:.3f}")
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3)
