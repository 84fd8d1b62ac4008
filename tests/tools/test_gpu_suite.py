"""The suite for a GPU, tried on the CPU at toy sizes: every section runs, finds faults, and keeps
to its time.
"""

import json
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from cope_jax import encodings
from cope_jax.attention import Reason, attend, fused
from tools import gpu_suite


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["packed", "causal", "two_sided"])
def test_it_compares_every_implementation_that_can_run(mask):
    records = gpu_suite.check_encoding("cope", "float32", mask, gpu_suite.TOY)
    errors = {record["implementation"]: record["error"] for record in records if "error" in record}
    assert "blockwise" in errors
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.slow
def test_it_finds_what_differs_and_names_what_is_refused(monkeypatch):

    def wrong(q, k, v, *, implementation, **options):
        out = attend(q, k, v, implementation=implementation, **options)
        return out + jnp.asarray(0.01 * (implementation == "blockwise"), out.dtype)

    monkeypatch.setattr(gpu_suite, "attend", wrong)
    monkeypatch.setattr(fused, "plan", lambda *arguments: Reason("not here"))
    refused, record = gpu_suite.check_encoding("rope", "float32", "causal", gpu_suite.TOY)
    assert refused["reason"] == "not here"
    assert record["error"] > gpu_suite.TOLERANCE["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["blockwise", "full"])
def test_bfloat16_is_compared_so_that_only_a_fault_differs(fault, monkeypatch):
    """Gate keys in bfloat16 are far from those in float32; a window that is short by one token is
    still found, and so is rounding of full attention.
    """

    def wrong(q, k, v, *, implementation, window, **options):
        window -= implementation == fault == "blockwise"
        out = attend(q, k, v, implementation=implementation, window=window, **options)
        return out * (1.25 if fault == "full" and q.dtype == jnp.bfloat16 else 1)

    monkeypatch.setattr(gpu_suite, "attend", wrong)
    gate = "cope(gate=separate_key)"
    records = gpu_suite.check_encoding(gate, "bfloat16", "packed", gpu_suite.TOY)
    errors = {record["implementation"]: record["error"] for record in records}
    limits = {name: gpu_suite.TOLERANCE["bfloat16"] for name in ("fused", "blockwise")}
    limits["full"] = gpu_suite.ROUNDING
    assert {name for name, limit in limits.items() if errors[name] > limit / 2} == {fault}
    assert errors[fault] > 1.5 * limits[fault]


def test_what_is_not_a_number_does_not_agree_and_what_fails_or_is_left_is_named(
    monkeypatch, tmp_path
):
    def check(spec, dtype, mask, sizes):
        case = {"encoding": spec, "mask": mask, "dtype": dtype}
        if spec == "kerple":
            raise RuntimeError("out of memory\nand more")
        if spec == "alibi":
            return [{**case, "implementation": "fused", "reason": "not here"}]
        error = float("nan") if spec == "fox" else 0.0
        return [{**case, "implementation": "blockwise", "error": error}]

    monkeypatch.setattr(gpu_suite, "check_encoding", check)
    summary = gpu_suite.check_encodings(tmp_path, gpu_suite.TOY, time.monotonic() + 60)
    assert "fox/blockwise (causal) in float32 differs by nan" in summary
    failed = "kerple (causal) in {} failed (out of memory)"
    assert f"{failed.format('float32')}; {failed.format('bfloat16')}" in summary
    assert summary.endswith("; no kernels for alibi, because not here")
    kernels = gpu_suite.FIRST
    cases = 2 * (3 * len(kernels) + len(set(encodings.names()) - set(kernels)))
    assert f"{cases - 6} of {cases - 4} comparisons agree" in summary
    late = gpu_suite.check_encodings(tmp_path, gpu_suite.TOY, time.monotonic() - 1)
    left = f"stopped at its time: {cases} of {cases} cases were not checked"
    assert late == f"0 of 0 comparisons agree; {left}"


def test_prefill_that_fails_is_named_and_the_others_count(monkeypatch, tmp_path):
    def seconds(spec, attention, sizes, end):
        if (spec, attention) == ("cope", "fused"):
            raise RuntimeError("ptxas failed\nand more")
        return [2.0, 1.0]

    monkeypatch.setattr(gpu_suite, "prefill_seconds", seconds)
    summary = gpu_suite.prefill(tmp_path, gpu_suite.TOY, time.monotonic() + 60)
    assert "cope/fused failed (ptxas failed), rope/blockwise 0.1 thousand tokens/s" in summary
    records = json.loads((tmp_path / "prefill.json").read_text())["records"]
    assert [record["tokens_per_second"] for record in records] == [64.0, None, *[64.0] * 4]


@pytest.mark.slow
def test_a_command_is_stopped_at_its_time(monkeypatch):
    """Politely, then by force; and it does not start if there is no time left."""
    sleep = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: begin([sys.executable, "-c", sleep]))
    monkeypatch.setattr(gpu_suite, "GRACE", 0.5)
    began = time.monotonic()
    assert gpu_suite.command("compare", [], began + 1) == "stopped"
    assert time.monotonic() - began < 10
    assert gpu_suite.command("compare", [], time.monotonic()) == "left out"


@pytest.mark.slow
def test_all_sections(tmp_path):
    words = ["-m", "tools.gpu_suite", "--toy", "--minutes=10", f"--workdir={tmp_path}"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "summary.json").read_text())["sections"]
    sections = {row["section"]: row["result"] for row in rows}
    assert list(sections) == list(gpu_suite.SECTIONS)
    assert "differs" not in sections["correctness"]
    assert sections["benchmark"] == "attention done, train done"
    assert sections["train"] == "quick done"
    assert "cope" in sections["prefill"]
    assert "cope/fused" in (tmp_path / "benchmark" / "attention" / "benchmark.md").read_text()
