import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cope_jax.training.summary import bytes_a_device, job_facts, summarise


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def shape(*sizes, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)


def rows(text):
    """The cells of each row of the table, by its name."""
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines() if "─" not in line]
    return {line[0]: line[1:] for line in lines}


def test_each_parameter_has_its_line(mesh):
    def split(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    params = {
        "blocks": {
            "mlp": {"kernel": shape(3, 8, 1024, sharding=split(None, "fsdp", "data"))},
            "norm": {"scale": shape(3, 1024, dtype="bfloat16", sharding=split())},
        },
        "embedding": {"embedding": shape(1024, 512, sharding=split(("data", "fsdp"), None))},
        "table": shape(6, 4, sharding=split(None, None)),
    }
    assert rows(summarise(params)) == {
        "parameter": ["shape", "type", "split over", "a device", "number"],
        "blocks.mlp.kernel": ["3, 8, 1024", "float32", "-, fsdp, data", "12.0 KiB", "24,576"],
        "blocks.norm.scale": ["3, 1024", "bfloat16", "whole", "6.0 KiB", "3,072"],
        "blocks, all": ["18.0 KiB", "27,648"],
        "": [],
        "embedding.embedding": ["1024, 512", "float32", "data+fsdp, -", "256.0 KiB", "524,288"],
        "table": ["6, 4", "float32", "whole", "96.0 B", "24"],
        "total": ["274.1 KiB", "551,960"],
    }


def test_shapes_without_shardings_and_arrays_are_whole():
    text = summarise({"a": shape(256, 1024), "b": jnp.zeros((2, 3))})
    assert rows(text)["a"] == ["256, 1024", "float32", "whole", "1.0 MiB", "262,144"]
    assert rows(text)["b"] == ["2, 3", "float32", "whole", "24.0 B", "6"]
    assert rows(text)["total"] == ["1.0 MiB", "262,150"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (255, "1,020.0 B"),
        (256, "1.0 KiB"),
        (2**18, "1.0 MiB"),
        (2**28, "1.0 GiB"),
        (2**39, "2,048.0 GiB"),
    ],
)
def test_units_of_bytes(size, text):
    assert rows(summarise({"a": shape(size)}))["a"][-2] == text


def test_bytes_a_device_count_keys_numbers_and_what_is_split(mesh):
    state = {
        "key": jax.eval_shape(jax.random.key, 0),
        "step": shape(dtype="int32"),
        "params": shape(16, 8, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
    }
    assert bytes_a_device(state) == 8 + 4 + 16 * 8 * 4 // 4


def test_the_job(mesh):
    facts = job_facts({"a": shape(1024)}, mesh, batch_size=8, length=512, flops_per_token=1.5e9)
    lines = summarise({"a": shape(2)}, facts).splitlines()
    assert lines[-5:] == [
        "devices      8 × cpu, 1 process",
        "mesh         data 2 × fsdp 4",
        "state        4.0 KiB a device: parameters, optimizer, random key",
        "batch        8 sequences of 512 tokens, 4,096 tokens a step",
        "model FLOPs  1.5 GFLOPs a token, 6.14 TFLOPs a step",
    ]


def test_the_job_counts_processes():
    devices = np.array(
        [types.SimpleNamespace(device_kind="TPU v4", process_index=i // 4) for i in range(8)]
    )
    mesh = types.SimpleNamespace(devices=devices.reshape(2, 4), shape={"data": 8})
    facts = job_facts({"a": shape(1)}, mesh, batch_size=1, length=1, flops_per_token=1.0)
    assert facts["devices"] == "8 × TPU v4, 2 processes"


def test_a_long_name_takes_several_lines_of_the_text():
    lines = summarise({"deep." * 40: shape(126, 16384, 53248)}).splitlines()
    assert 100 < max(map(len, lines)) <= 120
    assert any(line.endswith("109,924,319,232") for line in lines)
