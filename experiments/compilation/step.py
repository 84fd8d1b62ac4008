"""A training step compiled for a topology, and what its program tells."""

import dataclasses
import re
import time
from typing import Any

import jax

from cope_jax import tasks
from cope_jax.training import from_config
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.flops import peak_flops
from experiments.compilation import counts, loops
from experiments.compilation.counts import Collective
from experiments.compilation.hlo import Module
from experiments.compilation.topology import Topology
from experiments.compilation.turns import count_turns, turns_of


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      arguments: state and batches.
      outputs: the new state and the metrics.
      aliased: the part of the outputs that takes the place of arguments.
      temporaries: activations, gradients, and what else lives within the step.
      program: the code.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Memory":
        stats: Any = compiled.memory_analysis()
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
        )

    @property
    def peak(self) -> int:
        """What the device must hold at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program that compiled tells.

    Attributes:
      memory: bytes.
      flops: of the matrix products of one device in a step.
      collectives: messages between devices.
      cycles: the compiler's estimate of one device's work.
      turns: of loops whose number of turns the data decide, as they were counted.
      unknown_loops: loops that count as one turn because nothing is known of them.
    """

    memory: Memory
    flops: float
    collectives: list[Collective]
    cycles: counts.Cycles
    turns: dict[str, float]
    unknown_loops: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, and its program or why there is none.

    Attributes:
      topology: compiled for this.
      mesh: devices along each axis.
      batch_size, length: of a step, in sequences and tokens.
      parameters: of the model.
      flops_per_token: model FLOPs by formula.
      peak_flops: of a device; None: not known.
      compile_seconds: that it took.
      program: None where it does not fit.
      excess: what the compiler says of memory where it does not fit.
    """

    topology: Topology
    mesh: dict[str, int]
    batch_size: int
    length: int
    parameters: int
    flops_per_token: float
    peak_flops: float | None
    compile_seconds: float
    program: Program | None
    excess: str = ""

    @property
    def fits(self) -> bool:
        """Whether the compiler found room for it."""
        return self.program is not None and self.program.memory.peak <= self.topology.chip.hbm_bytes

    @property
    def compute_seconds(self) -> float | None:
        """The compiler's cycles over the clock; where it states none, the FLOPs at the device's peak."""
        program, clock = self.program, self.topology.chip.clock
        if program is None:
            return None
        if clock is not None and program.cycles.cycles:
            return program.cycles.cycles / clock
        return program.flops / self.peak_flops if self.peak_flops else None

    @property
    def collective_seconds(self) -> float | None:
        """What all messages take, one after another, at the bandwidth of a ring."""
        if self.program is None:
            return None
        return sum(collective.sent for collective in self.program.collectives) / self.topology.chip.ring_bandwidth

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """(all messages hidden behind compute as far as they can be, none of them hidden)."""
        compute, messages = self.compute_seconds, self.collective_seconds
        if compute is None or messages is None:
            return None
        return max(compute, messages), compute + messages

    def tokens_per_second(self, step_seconds: float) -> float:
        """Of all devices together."""
        return self.batch_size * self.length / step_seconds

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOPs utilisation, 1 at the peak."""
        if self.peak_flops is None:
            return None
        flops = self.batch_size * self.length * self.flops_per_token
        return flops / (step_seconds * len(self.topology.devices) * self.peak_flops)


def compile_step(config: ExperimentConfig, topology: Topology) -> Step:
    """Compiles the training step of an experiment for the devices of a topology.

    It is one step, of which training dispatches `training.steps_per_dispatch` in one loop.

    Raises:
      ConfigError: an experiment or mesh that does not fit the devices.
    """
    task = tasks.create(config.task.name, **config.task.options)
    program = from_config.create_program(config, task, devices=topology.devices)
    model, length = program.learner.model, task.length("train")
    kind = topology.devices[0].device_kind
    known = {
        "topology": topology,
        "mesh": dict(program.mesh.shape),
        "batch_size": config.training.batch_size,
        "length": length,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(program.state_shapes().params)),
        "flops_per_token": model.flops_per_token(length),
        "peak_flops": config.job.peak_flops or peak_flops(kind),
    }
    began = time.perf_counter()
    lowered = program.lower(from_config.batch_shapes(task, config.training.batch_size))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Step(**known, compile_seconds=time.perf_counter() - began, program=None, excess=excess(str(error)))
    seconds = time.perf_counter() - began
    return Step(**known, compile_seconds=seconds, program=read(compiled, topology, count_turns(model, length)))


def read(compiled: jax.stages.Compiled, topology: Topology, turns: dict[str, float]) -> Program:
    """What a compiled program tells of itself."""
    module = Module.parse(compiled.as_text() or "")
    visits = list(loops.visits(module, turns_of(turns)))
    return Program(
        Memory.of(compiled),
        counts.flops(visits),
        counts.collectives(visits, len(topology.devices)),
        counts.estimated_cycles(visits),
        turns,
        loops.unknown_loops(module, turns_of(turns)),
    )


def excess(message: str) -> str:
    """The sentence of a compiler's error that has the numbers.

    >>> excess("RESOURCE_EXHAUSTED: E1000: Ran out of memory on HBM, it needs 23.30G and there are 15.75G. Module: x")
    'Ran out of memory on HBM, it needs 23.30G and there are 15.75G'
    """
    found = re.search(r"((?:Ran )?out of memory[^\n]*?|Used [^\n]*?)(?:\.(?:\s|$)|\n|$)", message, re.IGNORECASE)
    return found[1] if found else " ".join(message.split())[:300]
