"""Tiny random GPT-2s and Llamas in folders of Hugging Face's files, written without the package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB, LENGTH, LAYERS = 13, 9, 2
WIDTH, HEADS, HIDDEN = 8, 4, 12
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": HIDDEN,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
}
JUNK = (None, True, 1.5, "x", [1.5], {"x": 1})
"""Values in place of right ones."""
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, untied": GPT2
    | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": None},
    "llama, grouped": LLAMA,
    "llama, tied, biased, stretched": LLAMA
    | {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": SCALING,
    },
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a file, by the names that transformers gives them."""
    if config["model_type"] == "gpt2":
        hidden = config["n_inner"] or 4 * WIDTH
        layer = {
            **dict.fromkeys(("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"), (WIDTH,)),
            **{"attn.c_attn.weight": (WIDTH, 3 * WIDTH), "attn.c_attn.bias": (3 * WIDTH,)},
            **{"attn.c_proj.weight": (WIDTH, WIDTH), "attn.c_proj.bias": (WIDTH,)},
            **{"mlp.c_fc.weight": (WIDTH, hidden), "mlp.c_fc.bias": (hidden,)},
            **{"mlp.c_proj.weight": (hidden, WIDTH), "mlp.c_proj.bias": (WIDTH,)},
        }
        tensors = {
            "transformer.wte.weight": (VOCAB, WIDTH),
            "transformer.wpe.weight": (LENGTH, WIDTH),
        }
        tensors |= {
            f"transformer.h.{number}.{name}": shape
            for number in range(LAYERS)
            for name, shape in layer.items()
        }
        tensors |= {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    else:
        heads, kv_heads = (
            config[name] * config["head_dim"]
            for name in ("num_attention_heads", "num_key_value_heads")
        )
        matrices = {
            "self_attn.q_proj": (heads, WIDTH),
            "self_attn.k_proj": (kv_heads, WIDTH),
            "self_attn.v_proj": (kv_heads, WIDTH),
            "self_attn.o_proj": (WIDTH, heads),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
        }
        layer = {f"{name}.weight": shape for name, shape in matrices.items()}
        layer |= {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
        if config.get("attention_bias"):
            layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
        tensors = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
        tensors |= {
            f"model.layers.{number}.{name}": shape
            for number in range(LAYERS)
            for name, shape in layer.items()
        }
    return (
        tensors if config["tie_word_embeddings"] else tensors | {"lm_head.weight": (VOCAB, WIDTH)}
    )


def tensors(config: dict[str, Any], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Random tensors of every name: no bias is at 0, no scale at 1."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(scale=0.5, size=shape).astype(dtype)
        for name, shape in shapes(config).items()
    }


def write(folder: Path, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    """The folder, with config.json and model.safetensors in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens() -> np.ndarray:
    """Two sequences, int32."""
    return np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH), dtype=np.int32)


def shard(folder):
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(arrays)}
    for file in sorted(set(places.values())):
        save_file(
            {name: array for name, array in arrays.items() if places[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
