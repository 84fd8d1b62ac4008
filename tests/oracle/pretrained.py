"""GPT-2 and Llama from the tensors of their published files, one token and one head at a time.

Radford et al. (2019); Touvron et al. (arXiv 2302.13971), with grouped queries, and with Llama 3.1's
stretched RoPE.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.oracle.decoder import gelu
from tests.oracle.encodings import stretched

Array = np.ndarray
Tensors = Mapping[str, Array]


def gpt2(tokens: Sequence[int], tensors: Tensors, config: Mapping[str, Any]) -> Array:
    """The logits `[L, V]` of a sequence. Matrices of layers in the file are [inputs, outputs]."""
    heads, epsilon = config["n_head"], config["layer_norm_epsilon"]
    activate = {"gelu_new": gelu, "gelu": exact_gelu}[config["activation_function"]]
    words, places = tensors["transformer.wte.weight"], tensors["transformer.wpe.weight"]
    x = [words[token] + places[position] for position, token in enumerate(tokens)]
    for number in range(config["n_layer"]):
        layer = tensors_below(tensors, f"transformer.h.{number}.")
        rows = [layer_norm(row, layer["ln_1.weight"], layer["ln_1.bias"], epsilon) for row in x]
        three = [row @ layer["attn.c_attn.weight"] + layer["attn.c_attn.bias"] for row in rows]
        q, k, v = (
            np.stack([np.split(row, 3)[which].reshape(heads, -1) for row in three])
            for which in range(3)
        )
        attended = [
            row @ layer["attn.c_proj.weight"] + layer["attn.c_proj.bias"] for row in attend(q, k, v)
        ]
        x = [row + more for row, more in zip(x, attended, strict=True)]
        for position, row in enumerate(x):
            normed = layer_norm(row, layer["ln_2.weight"], layer["ln_2.bias"], epsilon)
            inner = normed @ layer["mlp.c_fc.weight"] + layer["mlp.c_fc.bias"]
            hidden = np.array([activate(unit) for unit in inner])
            x[position] = row + hidden @ layer["mlp.c_proj.weight"] + layer["mlp.c_proj.bias"]
    out = tensors.get("lm_head.weight", words)
    scale, bias = tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"]
    return np.stack([out @ layer_norm(row, scale, bias, epsilon) for row in x])


def llama(tokens: Sequence[int], tensors: Tensors, config: Mapping[str, Any]) -> Array:
    """The logits `[L, V]` of one sequence. A matrix lies in the file as [outputs, inputs]."""
    width, epsilon = config["head_dim"], config["rms_norm_eps"]
    words = tensors["model.embed_tokens.weight"]
    x = [words[token] for token in tokens]
    for number in range(config["num_hidden_layers"]):
        layer = tensors_below(tensors, f"model.layers.{number}.")

        def linear(name, row, layer=layer):
            return layer[f"{name}.weight"] @ row + layer.get(f"{name}.bias", 0.0)

        rows = [rms_norm(row, layer["input_layernorm.weight"], epsilon) for row in x]
        q, k, v = (
            np.stack([linear(f"self_attn.{name}_proj", row).reshape(-1, width) for row in rows])
            for name in "qkv"
        )
        q, k = turned(q, config), turned(k, config)
        attended = [linear("self_attn.o_proj", row) for row in attend(q, k, v)]
        x = [row + more for row, more in zip(x, attended, strict=True)]
        for position, row in enumerate(x):
            normed = rms_norm(row, layer["post_attention_layernorm.weight"], epsilon)
            gate = np.array(
                [unit / (1 + math.exp(-unit)) for unit in linear("mlp.gate_proj", normed)]
            )
            x[position] = row + linear("mlp.down_proj", gate * linear("mlp.up_proj", normed))
    out = tensors.get("lm_head.weight", words)
    return np.stack([out @ rms_norm(row, tensors["model.norm.weight"], epsilon) for row in x])


def attend(q_LHK: Array, k_LGK: Array, v_LGK: Array) -> list[Array]:
    """The values of each token from itself and those before it, all heads side by side."""
    length, heads, width = q_LHK.shape
    share = heads // k_LGK.shape[1]
    result = []
    for i in range(length):
        row = []
        for head in range(heads):
            group = head // share
            weights = [
                math.exp(float(q_LHK[i, head] @ k_LGK[j, group]) / math.sqrt(width))
                for j in range(i + 1)
            ]
            row.append(sum(w * v_LGK[j, group] for j, w in enumerate(weights)) / sum(weights))
        result.append(np.concatenate(row))
    return result


def turned(x_LHK: Array, config: Mapping[str, Any]) -> Array:
    """Each pair of features (c, c + K/2) as a complex number, times e^(i·place·frequency)."""
    length, _, width = x_LHK.shape
    scaling = config.get("rope_scaling")
    llama3 = scaling and (
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    result = np.array(x_LHK)
    for c in range(width // 2):
        frequency = stretched(config["rope_theta"] ** (-2 * c / width), llama3)
        for position in range(length):
            pair = x_LHK[position, :, c] + 1j * x_LHK[position, :, c + width // 2]
            pair = pair * complex(math.cos(position * frequency), math.sin(position * frequency))
            result[position, :, c], result[position, :, c + width // 2] = pair.real, pair.imag
    return result


def layer_norm(row: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    """The row less its mean, over its standard deviation."""
    centred = row - sum(row) / len(row)
    return (
        centred / math.sqrt(sum(value**2 for value in centred) / len(row) + epsilon) * scale + bias
    )


def rms_norm(row: Array, scale: Array, epsilon: float) -> Array:
    """The row over its root mean square."""
    return row / math.sqrt(sum(value**2 for value in row) / len(row) + epsilon) * scale


def exact_gelu(x: float) -> float:
    """x Φ(x)."""
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def tensors_below(tensors: Tensors, prefix: str) -> dict[str, Array]:
    """The tensors whose names start so, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }
