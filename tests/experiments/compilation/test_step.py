import dataclasses
import json

import jax
import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.config import ExperimentConfig
from experiments import common
from experiments.compilation import report, step
from experiments.compilation.chips import Chip
from experiments.compilation.step import compile_step
from experiments.compilation.topology import Topology

pytestmark = pytest.mark.xdist_group("step")  # what its fixtures train is shared

CHIP = Chip("tpu", hbm_bytes=2**30, hbm_bandwidth=1e9, ring_bandwidth=1e6, shapes=("8",))
PEAK = 1e9
LENGTH = 6  # of training; others are tested too, up to 8


def config(**job):
    return ExperimentConfig.from_mapping(
        {
            "task": {"name": "selective_copy", "options": {"num_symbols": 4, "num_tokens": 2, "num_blanks": 2}},
            "model": {"num_layers": 3, "block": {"model_dim": 16, "num_heads": 2}},
            "encoding": "none",
            "optimizer": {"schedule": "constant", "warmup_steps": 2},
            "training": {"batch_size": 16},
            "evaluation": {"batch_size": 16},
            "job": {"peak_flops": PEAK, **job},
        }
    )


def devices(chip=CHIP):
    return Topology("cpu:8", chip, jax.devices())


@pytest.fixture(scope="module")
def compiled():
    return compile_step(config(mesh={"data": 4, "fsdp": 2}), devices())


def test_the_step_is_that_of_the_config_on_all_devices(compiled):
    assert {axis: size for axis, size in compiled.mesh.items() if size > 1} == {"data": 4, "fsdp": 2}
    assert (compiled.batch_size, compiled.length) == (16, LENGTH)
    assert compiled.parameters == common.Experiment(config(mesh={"data": 1})).parameters()
    assert compiled.fits


def test_the_state_is_split_and_takes_the_place_of_the_old_one(compiled):
    # Parameters and two moments, in float32, most of them split in two.
    state = 3 * 4 * compiled.parameters
    memory = compiled.program.memory
    assert state / 2 < memory.arguments < 0.8 * state
    assert memory.aliased > 0.95 * memory.outputs
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.program


def test_the_products_of_all_layers_and_examples_are_those_of_the_formula(compiled):
    assert 8 * compiled.program.flops == compiled.flops_per_token * 16 * LENGTH


def test_gradients_are_summed_over_all_devices_and_parameters_gathered(compiled):
    kinds = {c.kind for c in compiled.program.collectives}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert max(c.group for c in compiled.program.collectives) == 8


def test_one_device_sends_nothing():
    alone = compile_step(config(mesh={"data": 1}), devices())
    assert (alone.program.collectives, alone.collective_seconds) == ([], 0)


def test_times_follow_from_work_and_bandwidth(compiled):
    sent = sum(c.sent for c in compiled.program.collectives)
    assert compiled.collective_seconds == pytest.approx(sent / 1e6)
    assert compiled.compute_seconds == pytest.approx(compiled.program.flops / PEAK)
    hidden, shown = compiled.step_seconds
    assert hidden == max(compiled.compute_seconds, compiled.collective_seconds)
    assert shown == compiled.compute_seconds + compiled.collective_seconds
    assert compiled.tokens_per_second(0.5) == 16 * LENGTH / 0.5
    assert compiled.mfu(0.5) == pytest.approx(compiled.flops_per_token * 16 * LENGTH / (0.5 * 8 * PEAK))


def test_the_compilers_cycles_over_the_clock_are_the_time_where_there_are_any(compiled):
    cycles = dataclasses.replace(compiled.program.cycles, cycles=3e6)
    counted = dataclasses.replace(
        compiled,
        topology=devices(dataclasses.replace(CHIP, clock=1.5e9)),
        program=dataclasses.replace(compiled.program, cycles=cycles),
    )
    assert counted.compute_seconds == pytest.approx(2e-3)


def test_a_step_larger_than_the_memory_does_not_fit(compiled):
    small = dataclasses.replace(CHIP, hbm_bytes=compiled.program.memory.peak - 1)
    assert not dataclasses.replace(compiled, topology=devices(small)).fits


def test_a_compiler_that_runs_out_of_memory_is_a_step_that_does_not_fit(monkeypatch):
    sentence = "Ran out of memory on HBM, the total memory required (23.30G) exceeds available HBM (15.75G)"
    message = f"RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: {sentence}. HLO module: jit_f.\nSee https://openxla.org"

    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(step.common.Program, "lower", lambda self, *sizes: Lowered())
    found = compile_step(config(), devices())
    assert (found.fits, found.program) == (False, None)
    assert found.excess == sentence
    assert dict(report.rows(found))["the compiler"] == found.excess
    assert report.notes(found) == []
    assert json.loads(json.dumps(report.figures(found)))["fits"] is False


def test_another_error_of_the_compiler_is_raised(monkeypatch):
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(step.common.Program, "lower", lambda self, *sizes: Lowered())
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compile_step(config(), devices())


def test_a_mesh_that_the_devices_do_not_fill_is_wrong_input():
    with pytest.raises(ConfigError, match=r"job\.mesh"):
        compile_step(config(mesh={"data": 16}), devices())


def test_the_table_and_the_figures_say_the_same(compiled):
    shown, figures = dict(report.rows(compiled)), json.loads(json.dumps(report.figures(compiled)))
    assert shown["mesh"] == "data=4 × fsdp=2"
    assert shown["parameters"].replace(",", "") == str(figures["parameters"])
    assert shown["temporaries"] == report.size(figures["bytes"]["temporaries"])
    assert shown["MFU"] == report.between(*(f"{share:.1%}" for share in reversed(figures["mfu"])))
    assert {f"{c['kind']} among {c['group']}" for c in figures["collectives"]} <= shown.keys()
    assert any("peak" in note for note in report.notes(compiled))


def test_the_notes_say_what_is_not_in_the_estimate(compiled):
    cycles = dataclasses.replace(compiled.program.cycles, without={"gather_fusion": 4.0, "reduce": 2.0})
    program = dataclasses.replace(compiled.program, cycles=cycles, unknown_loops=3, turns={"diagonal": 1.5})
    chip = dataclasses.replace(CHIP, clock=1.5e9)
    text = "\n".join(report.notes(dataclasses.replace(compiled, topology=devices(chip), program=program)))
    assert "gather_fusion (4 times)" in text
    assert "reduce (" not in text
    assert "how often 3 loops turn" in text
    assert "near 1.50" in text
    assert "1.5 GHz" in text
