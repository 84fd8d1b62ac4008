import json

import jax
import pytest

from cope_jax.errors import ConfigError
from cope_jax.runs import experiment
from cope_jax.training.experiment_config import ExperimentConfig
from tools.compile_check import figures
from tools.compile_check.chips import Chip, Topology

pytestmark = pytest.mark.xdist_group("step")  # what its fixtures compile is shared

CHIP = Chip("tpu", hbm_bytes=2**30, hbm_bandwidth=1e9, ring_bandwidth=1e6, shapes=("8",))
PEAK = 1e9
LENGTH = 6  # of training; others are tested too, up to 8


def config(**job):
    options = {"num_symbols": 4, "num_tokens": 2, "num_blanks": 2}
    return ExperimentConfig.from_mapping(
        {
            "task": {"name": "selective_copy", "options": options},
            "model": {"num_layers": 2, "block": {"model_dim": 16, "num_heads": 2}},
            "encoding": "none",
            "optimizer": {"schedule": "constant", "warmup_steps": 2},
            "training": {"batch_size": 16},
            "evaluation": {"batch_size": 16},
            "job": {"peak_flops": PEAK, **job},
        }
    )


def compiled_for(**mesh):
    return figures.compile_step(config(mesh=mesh), Topology("cpu:8", CHIP, jax.devices()))


@pytest.fixture(scope="module")
def compiled():
    return compiled_for(data=4, fsdp=2)


def test_the_step_is_that_of_the_config_on_all_devices(compiled):
    split = {axis: size for axis, size in compiled["mesh"].items() if size > 1}
    assert split == {"data": 4, "fsdp": 2}
    assert (compiled["batch_size"], compiled["length"], compiled["devices"]) == (16, LENGTH, 8)
    assert compiled["parameters"] == experiment.Experiment(config(mesh={"data": 1})).parameters()
    assert compiled["fits"]


def test_the_state_is_split_and_takes_the_place_of_the_old_one(compiled):
    # Parameters and two moments, in float32, most of them split in two.
    state, memory = 3 * 4 * compiled["parameters"], compiled["bytes"]
    assert state / 2 < memory["arguments"] < 0.8 * state
    assert memory["aliased"] > 0.95 * memory["outputs"]
    kept = memory["outputs"] - memory["aliased"]
    assert memory["peak"] == memory["arguments"] + kept + memory["temporaries"] + memory["program"]


def test_gradients_are_summed_over_all_devices_and_parameters_gathered(compiled):
    kinds = {c["kind"] for c in compiled["collectives"]}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert max(c["group"] for c in compiled["collectives"]) == 8


@pytest.mark.slow
def test_one_device_sends_nothing():
    alone = compiled_for(data=1)
    assert (alone["collectives"], alone["collective_seconds"]) == ([], 0)


def test_times_follow_from_work_and_bandwidth(compiled):
    compute, messages = compiled["compute_seconds"], compiled["collective_seconds"]
    assert messages == pytest.approx(sum(c["sent_bytes"] for c in compiled["collectives"]) / 1e6)
    assert compute == pytest.approx(compiled["model_flops"] / 8 / PEAK)
    assert compiled["step_seconds"] == [max(compute, messages), compute + messages]
    rows = zip(
        *(compiled[name] for name in ("step_seconds", "tokens_per_second", "mfu")), strict=True
    )
    for seconds, rate, mfu in rows:
        assert rate == 16 * LENGTH / seconds
        assert mfu == pytest.approx(compiled["model_flops"] / (seconds * 8 * PEAK))


def test_the_compilers_cycles_over_the_clock_are_the_time_where_there_are_any(compiled):
    clock = {"clock": 1.5e9}
    counted = figures.predict(compiled | clock | {"estimated_cycles": 3e6})
    assert counted["compute_seconds"] == pytest.approx(2e-3)
    cycles = {"estimated_cycles": 1e6, "kernel_cycles": 2e6}
    with_kernels = figures.predict(compiled | clock | cycles)
    assert with_kernels["compute_seconds"] == counted["compute_seconds"]
    (note,) = (note for note in figures.notes(with_kernels) if "Fused" in note)
    assert note.startswith("Fused attention is 67% of the cycles")
    no_peak = figures.predict(counted | {"peak_flops": None})
    assert no_peak["mfu"] == [None, None] and "MFU" not in dict(figures.rows(no_peak))


def test_a_step_larger_than_the_memory_does_not_fit(monkeypatch):
    monkeypatch.setattr(figures, "memory_of", lambda compiled: {"peak": CHIP.hbm_bytes + 1})
    none = {"collectives": [], "estimated_cycles": 0, "kernel_heads": {}, "kernel_cycles": 0}
    monkeypatch.setattr(figures, "work_of", lambda *_: none)
    monkeypatch.setattr(figures.from_config.Program, "lower", lambda self, *sizes: Lowered())
    assert not compiled_for(data=8)["fits"]


class Lowered:
    """A step whose compiler raises an error, if there is one."""

    def __init__(self, error=None):
        self.error = error

    def compile(self):
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)
        return self

    def as_text(self):
        return ""


def test_a_compiler_that_runs_out_of_memory_is_a_step_that_does_not_fit(monkeypatch):
    sentence = "Ran out of memory on HBM, the total memory required (23.30G) exceeds available HBM (15.75G)"
    message = f"RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: {sentence}. HLO module: jit_f.\nSee https://openxla.org"
    monkeypatch.setattr(figures.from_config.Program, "lower", lambda self, *sizes: Lowered(message))
    content = compiled_for(data=8)
    assert (content["fits"], content["excess"], "bytes" in content) == (False, sentence, False)
    assert dict(figures.rows(content))["the compiler"] == sentence
    assert figures.notes(content) == []


def test_another_error_of_the_compiler_is_raised(monkeypatch):
    program = figures.from_config.Program
    monkeypatch.setattr(program, "lower", lambda self, *sizes: Lowered("INTERNAL: no"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiled_for(data=8)


def test_a_mesh_that_the_devices_do_not_fill_is_wrong_input():
    with pytest.raises(ConfigError, match=r"job\.mesh"):
        compiled_for(data=16)


def test_the_table_says_what_the_figures_say(compiled):
    shown = dict(figures.rows(json.loads(json.dumps(compiled))))
    assert shown["mesh"] == "data=4 × fsdp=2"
    assert shown["parameters"].replace(",", "") == str(compiled["parameters"])
    assert shown["temporaries"] == figures.size(compiled["bytes"]["temporaries"])
    assert shown["MFU"] == figures.between(*(f"{share:.1%}" for share in reversed(compiled["mfu"])))
    assert {f"{c['kind']} among {c['group']}" for c in compiled["collectives"]} <= shown.keys()
    assert any("peak" in note for note in figures.notes(compiled))


def test_the_notes_say_what_is_not_in_the_estimate(compiled):
    changed = {"without_estimate": {"gather_fusion": 4.0, "reduce": 2.0}, "clock": 1.5e9}
    changed |= {"unknown_loops": 3, "turns": {"near": 1.5}}
    text = "\n".join(figures.notes(compiled | changed))
    for phrase in ("gather_fusion (4 times)", "unknown length: 3.", "near 1.50", "1.5 GHz"):
        assert phrase in text
    assert "reduce (" not in text
    assert len(figures.notes(compiled)) == 2
