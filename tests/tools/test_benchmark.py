import doctest
import functools
import itertools
import json
import os
import signal
import statistics
import sys
import time

import pytest

from cope_jax.cli import flag_values
from cope_jax.cli.flag_values import read_names
from cope_jax.errors import ConfigError
from tools import timing
from tools.benchmark import benchmark_report, contenders, memory_use, process, workloads
from tools.benchmark.workloads import Problem, Recipe


def test_examples_in_docstrings():
    for module in (benchmark_report, contenders, flag_values, process, workloads):
        tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert tried.attempted and not tried.failed


class Clock:
    """A clock that only tasks and pauses move on."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def task(self, name, *seconds):
        durations = iter(seconds)

        def run():
            self.calls.append(name)
            self.now += next(durations)

        return run

    def sleep(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


def test_contenders_take_turns_and_every_other_round_runs_backwards():
    clock = Clock()
    tasks = {name: clock.task(name, 1.0, 2.0, 4.0) for name in "abc"}
    rounds = list(timing.interleave(tasks, 3, clock=clock, sleep=clock.sleep))
    assert "".join(clock.calls) == "abc" + "cba" + "abc"
    assert rounds == [pytest.approx(dict.fromkeys("abc", seconds)) for seconds in (1.0, 2.0, 4.0)]


def test_a_short_task_is_called_again_until_its_turn_is_over_and_the_median_counts():
    clock = Clock()
    [measured] = timing.interleave(
        {"a": clock.task("a", 0.03, 0.01, 0.02)}, 1, clock=clock, sleep=clock.sleep
    )
    assert len(clock.calls) == 3 and measured["a"] == pytest.approx(0.02)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert timing.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 9.0]) == 0.5
    assert statistics.median([1.0, 20.0, 3.0]) / statistics.median([2.0, 10.0, 9.0]) != 0.5


def run(cases, rounds=2, stop=lambda: False):
    results, kept = timing.Results(), []
    timing.run(cases, rounds, results, stop, lambda: kept.append(len(results.records)))
    return results, kept


def test_times_are_those_of_the_clock():
    clock, results = Clock(), timing.Results()
    task = clock.task("a", 1.0, 2.0, 4.0)  # the first call compiles
    case = timing.Case({"section": "train", "recipe": "r"}, {"a": lambda: {"step": task}}, "a")
    timing.run([case], 2, results, lambda: False, lambda: None, clock)
    assert results.records[0]["seconds"] == [2.0, 4.0]


def nothing(*names):
    return {name: lambda: {"step": functools.partial(time.sleep, 0.01)} for name in names}


def refused():
    raise timing.LeftOut("no room")


def test_records_have_medians_ratios_and_all_times(monkeypatch):
    times = iter(
        [{("a", "step"): 1.0, ("b", "step"): 4.0}, {("a", "step"): 2.0, ("b", "step"): 3.0}]
    )
    monkeypatch.setattr(timing, "interleave", lambda tasks, rounds, clock: times)
    results, kept = run([timing.Case({"section": "train", "recipe": "r"}, nothing("a", "b"), "b")])
    shared = {"section": "train", "recipe": "r", "what": "step", "reference": "b"}
    assert results.records == [
        {**shared, "contender": name, "median_seconds": median, "ratio": ratio, "seconds": seconds}
        for name, median, ratio, seconds in [
            ("a", 1.5, (1 / 4 + 2 / 3) / 2, [1.0, 2.0]),
            ("b", 3.5, 1.0, [4.0, 3.0]),
        ]
    ]
    assert kept == [2]


def test_who_is_left_out_is_named_and_another_is_the_reference():
    builds = {"a": refused, **nothing("b")}
    cases = [timing.Case({"section": "attention", "length": n}, builds, "a") for n in (8, 16)]
    results, kept = run(cases)
    assert kept == [1, 2]
    names = [(r["contender"], r["reference"], r["ratio"]) for r in results.records]
    assert names == [("b", "b", 1.0)] * 2
    assert results.reasons() == ["a (8, 16): no room"]


def test_a_stop_keeps_the_rounds_that_are_complete():
    cases = [timing.Case({"section": "train", "recipe": name}, nothing("a"), "a") for name in "xy"]
    # Before x, behind its warm-up and rounds 1 and 2, before y.
    asked = iter([False, False, False, True, True])
    results, kept = run(cases, rounds=5, stop=lambda: next(asked))
    assert [(record["recipe"], len(record["seconds"])) for record in results.records] == [("x", 2)]
    assert kept == [1]


def test_memory_is_what_two_calls_take_beyond_the_start():
    """Here in a process that has done other work, where only XLA's own figure is known."""
    measured = memory_use.measure_here("cope/full", Problem(64, heads=2, head_dim=16))
    square = 4 * 2 * 64**2
    assert square < measured["temp_bytes"] < 40 * square
    assert measured["start_bytes"] <= measured["peak_bytes"]


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    measured = memory_use.measure("cope/full", Problem(256, heads=2, head_dim=16))
    square = 4 * 2 * 256**2
    assert square < measured["temp_bytes"] < 40 * square
    assert measured["start_bytes"] < measured["peak_bytes"] < measured["start_bytes"] + 100 * square


def test_who_is_left_out_of_memory_is_named(monkeypatch):
    monkeypatch.setattr(memory_use, "measure", memory_use.measure_here)
    results = timing.Results()
    memory_use.run([Problem(length=8)], ["none/ring"], results, lambda: False, lambda: None)
    assert not results.records
    assert "ring attention needs several devices" in results.left_out[0]["reason"]


def timed(contender, direction, length, seconds, ratio, **fields):
    times = {"median_seconds": seconds, "ratio": ratio, "reference": "cope/blockwise"}
    case = {"section": "attention", "contender": contender, "what": direction}
    return {**case, **vars(Problem(length)), **times, **fields}


RECORDS = [
    timed(contender, direction, length, factor * length / 1e6, factor / 2)
    for contender, factor in (("cope/blockwise", 2.0), ("cope/full", 9.0))
    for direction in ("forward", "forward+backward")
    for length in (512, 1024)
]
MEMORY = {"start_bytes": 5 * 2**20, "peak_bytes": 8 * 2**20, "temp_bytes": 2**20}


def test_tables_show_times_ratios_and_gaps():
    memory = timed("rope/full", "forward", 64, None, None, section="memory", **MEMORY)
    trained = timed("cope", "step", 9, 1.0, None, section="train", recipe="quick", devices=2)
    forward, backward, weighed, trained = benchmark_report.tables([*RECORDS[:-1], memory, trained])
    sizes = "B1 H8 K64, float32, npos_max 64, JAX on 1 device"
    title = f"Attention, forward, causal, {sizes}: time, and ratio to cope/blockwise"
    assert forward.title == title
    assert trained.title.startswith("Training, step, JAX on 2 devices: time, and ratio to ")
    assert forward.headings == ["length", "512", "1024"]
    cells = [[cell.replace(benchmark_report.FIRM, " ") for cell in row] for row in forward.rows]
    assert cells == [
        ["cope/blockwise", "1.02 ms  1.00×", "2.05 ms  1.00×"],
        ["cope/full", "4.61 ms  4.50×", "9.22 ms  4.50×"],
    ]
    assert backward.rows[1][2] == benchmark_report.MISSING
    assert weighed.rows[0][1].replace(benchmark_report.FIRM, " ") == "3 MiB  1 MiB"
    text = benchmark_report.markdown(RECORDS, ["a (8): no room"], {"jax": "1.2.3"})
    for line in ("| cope/full | 4.61", "- a (8): no room", "- jax: 1.2.3"):
        assert line in text


@pytest.fixture
def started(monkeypatch):
    """The processes that are started anew."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    return calls


def test_a_process_is_set_up_once_and_keeps_what_the_user_set(monkeypatch, started):
    monkeypatch.setattr(process, "_is_glibc", lambda: True)
    for name in ("LD_PRELOAD", *process._ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    process.restart(["-m", "tools.benchmark"])
    [(program, arguments, environment)] = started
    assert (program, arguments) == (sys.executable, [sys.executable, "-m", "tools.benchmark"])
    assert (
        environment["OMP_WAIT_POLICY"] == "ACTIVE"
        and environment.items() >= process._ALLOCATOR.items()
    )
    assert not process.untuned(environment).keys() & process._ALLOCATOR.keys()
    assert "allocator tuned, MALLOC_TOP_PAD_=" in process.describe(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process.restart([])
    assert len(started) == 1


SPLIT = "--xla_force_host_platform_device_count={} --xla_cpu_multi_thread_eigen=false"


@pytest.mark.parametrize(
    ("set_by_user", "devices", "flags"),
    [
        ({"XLA_FLAGS": "--a"}, 4, f"--a {SPLIT.format(4)}"),
        ({"JAX_PLATFORMS": ""}, 2, SPLIT.format(2)),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 4, None),
        ({"JAX_PLATFORMS": "cuda,cpu"}, 4, None),
        ({}, 1, None),
    ],
)
def test_a_cpu_is_split_into_devices(set_by_user, devices, flags, monkeypatch, started):
    monkeypatch.setattr(process, "_is_glibc", lambda: False)
    monkeypatch.delenv("XLA_FLAGS")
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "JAX_PLATFORMS": "cpu", **set_by_user}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process.restart(["-m", "tools.benchmark"], devices)
    assert [environment["XLA_FLAGS"] for _, _, environment in started] == ([flags] if flags else [])


SMALL = ["--heads=2", "--head_dim=4", "--rounds=2", "--devices=2", "--lengths=8"]


def measured(start, workdir, *flags):
    done = start("tools.benchmark", *SMALL, f"--workdir={workdir}", *flags).wait()
    assert done.status == 0, done.err
    content = json.loads((workdir / "benchmark.json").read_text())
    for record in content["records"]:
        if record["section"] == "memory":
            assert record["peak_bytes"] > 0
            continue
        seconds = record["seconds"]
        assert record["median_seconds"] == statistics.median(seconds) and len(seconds) == 2
        assert record["devices"] == (1 if record["section"] == "decode" else 2)
    assert "XLA_FLAGS=" in done.out and "JAX on 2 devices" in done.out
    busy = "the machine was busy at the start"
    assert (f"warning: {busy}" in done.err) == (busy in done.out)
    assert {path.name for path in workdir.iterdir()} == {".lock", "benchmark.json", "benchmark.md"}
    environment = content["environment"]
    assert environment["cores"] >= 1 and "OMP_WAIT_POLICY=" in environment["process"]
    return content, done.out


MINE = (
    "from cope_jax.encodings import ENCODINGS, Encoding\n"
    '@ENCODINGS.register("mine")\nclass Mine(Encoding):\n    """None."""\n'
)


@pytest.mark.slow
def test_the_command(start, tmp_path):
    """It measures, prints and writes; also an encoding of a file, in the process for memory too."""
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    flags = ["--notune", "--only=attention,memory", "--contenders=mine/full", "--npos_max=T"]
    flags += ["--memory_lengths=16", f"--encoding={mine}"]
    content, out = measured(start, tmp_path / "new" / "run", *flags)
    assert "mine/full" in out and "npos_max 8" in out
    timed, weighed = content["records"][:2], content["records"][2:]
    assert [r["what"] for r in timed] == ["forward", "forward+backward"]
    assert [r["contender"] for r in weighed] == ["mine/full"] and not content["left_out"]


@pytest.mark.slow
def test_the_command_starts_again_with_another_environment_and_measures_all(start, tmp_path):
    flags = ["--contexts=8", "--encodings=rope", "--recipes=quick@2", "--npos_max=4,T"]
    flags += ["--only=attention,decode,train", "--contenders=rope/full,cope/full"]
    content, out = measured(start, tmp_path, *flags)
    assert "cope/full" in out and "npos_max 8" in out
    names = [
        (r["section"], r.get("npos_max"), r["contender"], r["what"])
        for r in content["records"]
        if "x-transformers" not in r["contender"]
    ]
    pairs = itertools.product((4, 8), ("rope/full", "cope/full"), ("forward", "forward+backward"))
    assert names == [
        *(("attention", *pair) for pair in pairs),
        *(("decode", n, "rope", "attention of one token") for n in (4, 8)),
        ("train", None, "rope", "step"),
    ]
    assert {r["reference"] for r in content["records"]} == {"rope/full", "rope"}
    if process._is_glibc():
        assert "MALLOC_MMAP_THRESHOLD_=" in content["environment"]["process"]


@pytest.mark.slow
def test_an_interruption_keeps_what_was_measured(start, tmp_path):
    flags = [*SMALL, "--notune", "--only=attention", "--npos_max=4,T", "--rounds=10"]
    flags += ["--contenders=rope/full,cope/full", f"--workdir={tmp_path}"]
    command = start("tools.benchmark", *flags)
    command.signal_when((tmp_path / "benchmark.md").exists, signal.SIGINT)
    done = command.wait()
    assert done.status == 130, done.err
    assert f"stopped early; {tmp_path} has what was measured so far" in done.err
    records = json.loads((tmp_path / "benchmark.json").read_text())["records"]
    assert len(records) >= 4 and {record["npos_max"] for record in records} <= {4, 8}


def problems(flag="lengths", lengths=("8",), npos_max=("4",), *sizes):
    return lambda: workloads.read_problems(flag, lengths, npos_max, *sizes)


def contender(text):
    return lambda: read_names("contenders", text, contenders.find)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (problems(lengths=("512", "1k")), "--lengths takes positive whole .* '1k'"),
        (problems("contexts", ()), "--contexts takes positive whole numbers .*, not ''"),
        (problems(npos_max=("t",)), "--npos_max takes positive .* not 't'"),
        (problems(npos_max=("1",)), "benchmark.npos_max must be at least 2, got 1"),
        (problems("lengths", ("8",), ("4",), 1, 2, 7), "benchmark.head_dim must be even"),
        (lambda: Problem(8, heads=4, devices=3), "3 devices cannot share 4 heads"),
        (contender("cope/flash"), "unknown contender 'cope/flash'"),
        (contender("coppe/full"), "unknown encoding 'coppe': did you mean 'cope'?"),
        (contender("cope/full,cope/full"), "--contenders names 'cope/full' twice"),
        (lambda: Recipe.parse("quik"), "unknown config 'quik': did you mean 'quick'?"),
        (lambda: Recipe.parse("quick@0"), "--recipes=quick@0: write NAME@BATCH with a batch size"),
        (lambda: process.choose(9), "--devices=9, but JAX has 8"),
    ],
)
def test_what_cannot_be_read_is_one_line(read, message):
    with pytest.raises(ConfigError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--only=atention", "unknown section of --only 'atention': did you mean 'attention'?"),
        ("--reference=cope/ful", "unknown --reference 'cope/ful': did you mean 'cope/full'?"),
        ("--encoding={mine}", "registers mine, but --contenders is cope,rope: give --contenders="),
    ],
)
def test_a_wrong_flag_is_one_line_and_leaves_nothing_behind(flag, message, start, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    flags = [f"--workdir={tmp_path / 'run'}", "--notune", "--contenders=cope/full,rope/full"]
    done = start("tools.benchmark", *flags, "--only=memory", flag.format(mine=mine)).wait()
    assert done.status == 2, done.err
    assert message in done.error
    assert not (tmp_path / "run").exists()
