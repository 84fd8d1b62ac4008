import dataclasses
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from cope_jax.errors import ConfigError
from tests.attention.test_generated import native as native
from tests.encodings.cases import rule_of
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.attention import cope_backward
from tests.oracle.encodings import Sizes
from tools.benchmark import contenders, workloads
from tools.benchmark.workloads import STEP, Problem, Recipe
from tools.timing import LeftOut

PROBLEM = Problem(length=16, npos_max=4, batch=1, heads=2, head_dim=8, dtype="float64")
TORCH, OURS = contenders.OF_TORCH, contenders.OURS


def computed(name, devices=1):
    """out, dq, dk, dv and the gradients of parameters, by a contender, which must agree with its
    own forward.
    """
    with jax.numpy_dtype_promotion("standard"):  # jax.nn relies on it in float64
        try:
            tasks = contenders.find(name)(dataclasses.replace(PROBLEM, devices=devices))
        except LeftOut as reason:
            if name not in TORCH:  # only PyTorch may be missing
                raise
            pytest.skip(str(reason))
        results, again = tasks["forward+backward"](), tasks["forward"]()
        if isinstance(again, jax.Array):
            assert {len(array.sharding.device_set) for array in (again, *results)} == {devices}
        np.testing.assert_allclose(
            np.asarray(again), np.asarray(results[0]), rtol=0, atol=tolerance(name)
        )
    return tuple(np.asarray(array) for array in results)


def tolerance(name):
    """Of float64, but for two whose softmax is float32 whatever it is given: 8e-8 and 2e-7
    measured.
    """
    return 1e-5 if name in ("cope/x-transformers", "rope/jax.nn") else 1e-10


def test_the_tangent_is_that_of_growing_inputs(x64):
    tasks = contenders.find("rope/full")(dataclasses.replace(PROBLEM, jvp=True))
    out, tangent = tasks["jvp"]()
    np.testing.assert_array_equal(out, tasks["forward"]())
    step, arrays = 1e-6, PROBLEM.arrays()
    ends = []
    for factor in (1 - step, 1 + step):
        grown = [factor * array.astype(np.float64) for array in arrays]
        with mock.patch.object(Problem, "arrays", return_value=grown):
            ends.append(contenders.find("rope/full")(PROBLEM)["forward"]())
    np.testing.assert_allclose(tangent, (ends[1] - ends[0]) / (2 * step), rtol=0, atol=1e-8)


def check_against_oracle(name, devices=1):
    out, *gradients = computed(name, devices)
    heads, width, near = PROBLEM.heads, PROBLEM.head_dim, {"rtol": 0, "atol": tolerance(name)}
    q, k, v, cotangent = (array.astype(np.float64) for array in PROBLEM.arrays())
    table = PROBLEM.parameter((PROBLEM.npos_max, width)).astype(np.float64)
    sizes = Sizes(heads, heads, width, heads * width, PROBLEM.length)
    cope = name.startswith("cope/")
    spec, params = (
        (f"cope(npos_max={PROBLEM.npos_max})", {"table": table}) if cope else ("rope", {})
    )
    exact = oracle_attention(q[0], k[0], v[0], rule_of(spec, params, sizes))
    np.testing.assert_allclose(out[0], exact, **near)
    if cope:
        arrays = [[array[0, :, head] for array in (q, k, v)] for head in range(heads)]
        dout = [cotangent[0, :, head] for head in range(heads)]
        *inputs, tables = zip(
            *(cope_backward(*arrays[head], table, dout[head]) for head in range(heads)), strict=True
        )
        for gradient, by_head in zip(gradients[:3], inputs, strict=True):
            np.testing.assert_allclose(gradient[0], np.stack(by_head, axis=1), **near)
        np.testing.assert_allclose(gradients[3], sum(tables), **near)
    return out, *gradients


SLOW = [name for name in OURS if not name.endswith(("/fused", "cope/full"))]


@pytest.mark.parametrize(
    "name", ["cope/full", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_our_contenders_compute_the_encoding_over_two_devices(name, x64):
    results = check_against_oracle(name, devices=2)
    of_full = computed(f"{name.partition('/')[0]}/full")
    for actual, exact in zip(results, of_full, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi+cope/blockwise", "cope/fused"])
def test_heads_are_split_over_devices(name, request):
    if name.endswith("fused"):
        request.getfixturevalue("native")
    problem = dataclasses.replace(PROBLEM, heads=4, head_dim=16, dtype="float32")
    shared = contenders.find(name)(dataclasses.replace(problem, devices=2))["forward"]()
    assert len(shared.sharding.device_set) == 2
    alone = contenders.find(f"{name.partition('/')[0]}/full")(problem)["forward"]()
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["alibi", "t5"])  # other constants, other parameters
def test_a_kernel_whose_heads_differ_is_left_out(spec):
    with pytest.raises(LeftOut, match=f"the heads of {spec} differ"):
        contenders.find(f"{spec}/fused")(dataclasses.replace(PROBLEM, devices=2))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("compiled")) for name in TORCH],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own compiler
def test_contenders_of_torch_compute_the_encoding(name, x64, one_core, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_against_oracle(name)


@pytest.fixture
def one_core(monkeypatch):
    """PyTorch's threads would wait for each other on a busy machine."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    from tools.benchmark import torch_contenders

    monkeypatch.setattr(torch_contenders, "cores", lambda: 1)


def test_without_torch_its_contenders_are_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tools.benchmark.torch_contenders", raising=False)
    monkeypatch.delattr(sys.modules["tools.benchmark"], "torch_contenders", raising=False)
    for name in TORCH:
        with pytest.raises(
            LeftOut, match=r"torch is not installed: run pip install 'cope-jax\[bench\]'"
        ):
            contenders.find(name)(PROBLEM)


def test_a_matrix_of_all_pairs_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(workloads, "free_memory", lambda: 1e9)
    big = Problem(length=4096)
    for name in ("cope/full", "rope/jax.nn"):
        with pytest.raises(LeftOut, match=r"0\.9 GiB of free memory"):
            contenders.find(name)(big)
    contenders.find("cope/full")(Problem(length=8))


def test_parameters_are_not_those_of_the_start(x64):
    """A table of zeros would let a wrong position pass."""
    assert np.abs(Problem(4).parameter((4, 8))).min() > 0
    assert np.abs(computed("cope/full")[4]).max() > 0.01


def test_a_decoded_token_is_the_last_row_of_attention():
    encoding, problem = "cope(npos_max=3)+rope", dataclasses.replace(PROBLEM, dtype="float32")
    [task] = contenders.decode(encoding, problem).values()
    whole = contenders.find(f"{encoding}/full")(problem)["forward"]()
    # Every call enters the same token; 2e-7 measured, and a wrong token or place gives 0.1.
    for _ in range(3):
        np.testing.assert_allclose(task(), whole[:, -1:], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_training_step_trains():
    recipe = Recipe.parse("quick@4")
    step = contenders.train(recipe, "none", devices=2)[STEP]
    losses = [step() for _ in range(5)]
    assert recipe.batch()["inputs"].shape[0] == 4
    assert losses[-1] < losses[0] < 10


def test_a_batch_is_split_over_the_devices_that_can_share_it(monkeypatch):
    create = mock.Mock()
    monkeypatch.setattr(contenders.from_config, "create_program", create)
    case = contenders.training_case(Recipe.parse("quick@4"), ["none"], devices=6)
    case.builds["none"]()
    assert case.fields["devices"] == 2
    config, devices = create.call_args.args[0], create.call_args.kwargs["devices"]
    assert (config.job.mesh.data, len(devices)) == (2, 2)


def test_a_training_step_of_x_transformers_trains(one_core):
    recipe = Recipe.parse("quick@4")
    for encoding in contenders.X_TRANSFORMERS:
        step = contenders.of_torch("x_transformers_step", recipe, encoding)[STEP]
        losses = [step() for _ in range(6)]
        assert losses[-1] < losses[0] < 10
    with pytest.raises(LeftOut, match="the default block"):
        contenders.of_torch("x_transformers_step", Recipe.parse("counting@1"), "cope")


def test_an_unknown_contender_is_answered_with_a_short_list():
    with pytest.raises(ConfigError, match="unknown encoding 'cpoe': did you mean 'cope'"):
        contenders.find("cpoe")
    with pytest.raises(ConfigError, match="unknown contender 'cope/fsued': did you mean") as caught:
        contenders.find("cope/fsued")
    assert len(str(caught.value)) < 600
