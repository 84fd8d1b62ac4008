import importlib.util
import json
import os
import subprocess
import sys

import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.throughput import peak_flops
from tools.compile_check import chips

QUICK = "cope_jax/configs/quick.py"


def test_an_unknown_topology_is_told_which_are_known():
    for name in ("v9:2x2", "v5e", "v5e:", "v5e:2xtwo", "v5e:0x2", "cpu:8", ""):
        with pytest.raises(ConfigError, match=r"^unknown [^\n]*v5e:1x1\|2x2[^\n]*$"):
            chips.find(name)
    for name in ("v5e:2x2x1", "v5p:2x4", "h100:2x2"):
        with pytest.raises(ConfigError, match="give a shape of"):
            chips.find(name)


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("v5e:2x2", "libtpu", r"cope-jax\[tpu-compile\]"),
        ("h100:8", "jax_plugins", "jax-cuda13-plugin"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, name, missing, hint):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if missing in module else find_spec(module)
    )
    with pytest.raises(ConfigError, match=f"pip install '{hint}"):
        chips.describe(name)


# The kinds that JAX says devices of these chips are.
KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
KINDS |= {"tpu7x": "TPU7x", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


@pytest.mark.parametrize("name", chips.CHIPS)
def test_every_chip_has_a_peak_and_a_clock_that_agrees_with_it(name):
    chip, peak = chips.CHIPS[name], peak_flops(KINDS[name])
    assert peak is not None
    if chip.clock is not None:
        squares = peak / chip.clock / (2 * 128 * 128)  # matrix units of 128 × 128
        assert squares == pytest.approx(round(squares), rel=0.01)
        assert round(squares) in (4, 8, 16)
    else:
        assert KINDS[name] in chips.target_config(chip)


def test_wrong_input_ends_the_command_with_one_line(start, tmp_path):
    path = tmp_path / "none" / "x.json"
    for flags, message in (
        (["--topology=v9:2x2"], "unknown topology 'v9:2x2': choose one of v4:"),
        (
            ["--topology=v5e:2x2", f"--json={path}"],
            f"cannot write --json={path}: create the folder",
        ),
    ):
        done = start("tools.compile_check", f"--config={QUICK}", *flags).wait()
        assert (done.status, done.out) == (2, "") and done.error.startswith(message)


def check(name, *flags):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tools.compile_check", f"--topology={name}", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: extra tpu-compile"
)


@NEEDS_LIBTPU
class TestWithLibtpu:
    @pytest.mark.parametrize(
        "name",
        [
            "v5e:2x2",
            *(
                pytest.param(name, marks=pytest.mark.slow)
                for name in ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
            ),
        ],
    )
    def test_the_smallest_config_compiles_and_fits(self, name, tmp_path):
        mesh = "--config.job.mesh.fsdp=2"
        done = check(name, f"--config={QUICK}", mesh, f"--json={tmp_path}/x.json")
        assert done.returncode == 0, done.stderr
        figures = json.loads((tmp_path / "x.json").read_text())
        assert (figures["chips"], figures["fits"]) == (4, True)
        assert figures["mesh"]["fsdp"] == 2
        assert figures["unknown_loops"] == 0
        assert figures["estimated_cycles"] > 0
        # Gradients are summed over data.
        assert "all-reduce" in {c["kind"] for c in figures["collectives"]}
        assert 0 < figures["mfu"][0] < 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("config", "name"), [("lm:125m", "v5e:4x4"), ("lm:1b", "v5p:2x4x4"), ("lm:8b", "v5e:16x16")]
    )
    def test_the_configs_at_scale_compile_and_fit(self, config, name):
        done = check(name, f"--config={config}_noise")
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.slow
    def test_a_step_that_is_too_large_does_not_fit(self):
        batch = 2**17
        flags = (f"--config.training.batch_size={batch}", "--config.model.block.model_dim=1024")
        done = check("v5e:1x1", f"--config={QUICK}", *flags)
        assert (done.returncode, done.stderr) == (1, "")
        assert "does not fit" in done.stdout
        assert "Traceback" not in done.stdout

    @pytest.mark.slow
    def test_a_shape_that_the_compiler_refuses_is_wrong_input(self):
        done = check("v5e:3x3", f"--config={QUICK}")
        assert done.returncode == 2
        assert done.stderr.startswith("error: cannot create topology 'v5e:3x3' (")
