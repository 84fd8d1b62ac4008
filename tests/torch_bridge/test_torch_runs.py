"""The operator runs in PyTorch without copies, compiled once, and with all of autograd."""

import json
import pickle
import re

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra of the tests")
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from cope_jax import encodings  # noqa: E402
from cope_jax.errors import ConfigError  # noqa: E402
from cope_jax.torch import Encoding, attend, torch_op, torch_program  # noqa: E402
from tests.encodings.cases import every  # noqa: E402
from tests.torch_bridge.test_torch_attend import encoding_of, tensors  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch_runs")
SPEC = "cope(npos_max=4)"


@pytest.fixture(scope="module")
def cope():
    return encoding_of(SPEC, torch.float32)


def gradients(out, *inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


@pytest.fixture
def converted(monkeypatch):
    """The arrays that programs get and return."""
    arrays, results = [], []
    compute, convert = torch_program.Program._compute, jax.dlpack.from_dlpack

    def watched(self, *given):
        results.extend(made := compute(self, *given))
        return made

    def watched_conversion(tensor):
        arrays.append(convert(tensor))
        return arrays[-1]

    monkeypatch.setattr(torch_program.Program, "_compute", watched)
    monkeypatch.setattr(jax.dlpack, "from_dlpack", watched_conversion)
    return arrays, results


def test_nothing_is_copied(cope, converted):
    q, k, v, _ = tensors(dtype=torch.float32)
    out = attend(q, k, v, encoding=cope)
    arrays, results = converted
    pointers = [array.unsafe_buffer_pointer() for array in arrays]
    assert pointers == [x.data_ptr() for x in (q, k, v, cope.table)]
    assert out.data_ptr() == results[0].unsafe_buffer_pointer()
    kept = [x.data_ptr() for x in out.grad_fn.saved_tensors]
    memory = pointers + [array.unsafe_buffer_pointer() for array in results]
    assert len(set(kept)) == len(kept) and set(kept) <= set(memory)


def test_a_tensor_in_another_order_is_copied_once_and_right(cope, converted):
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32))
    expected = attend(q, k, v, encoding=cope)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([k, k], -1)[..., :4]
    shifted = torch.cat([torch.zeros(1), v.reshape(-1)])[1:].view(v.shape)  # not aligned
    torch.testing.assert_close(attend(turned, wide, shifted, encoding=cope), expected)


def test_a_shape_is_traced_once(cope):
    q, k, v, _ = tensors(length=7, dtype=torch.float32)
    traces = []
    evaluate, counted = torch_program._evaluate, lambda *call: traces.append(1) or evaluate(*call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_program, "_evaluate", counted)
        for _ in range(3):
            gradients(attend(q, k, v, encoding=cope), q)
        assert len(traces) == 1
        with torch.no_grad():
            attend(q, k, v, encoding=cope)
            attend(q, k, v, encoding=cope)
        assert len(traces) == 2


def test_residuals_are_made_only_where_a_gradient_is_needed(cope, converted):
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32))
    _, results = converted
    with torch.no_grad():
        attend(q.requires_grad_(), k, v, encoding=cope)
    assert len(results) == 1
    attend(q, k, v, encoding=cope)
    assert len(results) > 2


def test_results_are_complete_and_inputs_may_be_overwritten():
    """Large enough that JAX would still be computing when the call returned."""
    encoding = Encoding("alibi", num_heads=4, head_dim=32)
    q, k, v = torch.randn(3, 1, 1024, 4, 32)
    kept = [x.clone() for x in (q, k, v)]
    out = attend(q, k, v, encoding=encoding, implementation="full")
    copy = out.clone()
    for x in (q, k, v):
        x.fill_(torch.nan)
    out = out.add(0)
    del q, k, v
    again = attend(*kept, encoding=encoding, implementation="full")
    torch.testing.assert_close(copy, again)
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(cope, reentrant):
    q, k, v, _ = tensors(dtype=torch.float32)

    def layer(q, k, v):
        return attend(q, k, v, encoding=cope, dropout_rate=0.5)

    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        out = checkpoint(layer, q, k, v, use_reentrant=reentrant) if recompute else layer(q, k, v)
        out.square().sum().backward()
        results.append([out, *(x.grad for x in (q, k, v, cope.table))])
        for x in (q, k, v, cope.table):
            x.grad = None
    torch.testing.assert_close(*results)


def test_autocast_converts_as_attention_of_pytorch(cope):
    q, k, v, _ = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, encoding=cope)
        plain = torch.nn.functional.scaled_dot_product_attention(q, k.repeat(1, 1, 2, 1), q)
    assert out.dtype == plain.dtype == torch.bfloat16
    assert {x.dtype for x in gradients(out, q, cope.table)} == {torch.float32}
    half = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(attend(*half, encoding=cope), out)
    doubles = [x.double() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*doubles, encoding=cope).dtype == torch.float64
    assert not jax.config.jax_enable_x64


def test_compiled_by_pytorch(cope):
    q, k, v, _ = tensors(dtype=torch.float32)

    def layer(q, k, v):
        return attend(2 * q, k, v, encoding=cope, window=4).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    loss, expected = compiled(q, k, v), layer(q, k, v)
    torch.testing.assert_close(loss, expected)
    inputs = (q, k, v, cope.table)
    torch.testing.assert_close(gradients(loss, *inputs), gradients(expected, *inputs))
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), expected.detach())


@pytest.mark.slow
def test_compiled_with_numbers_that_change(cope):
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32))

    def layer(q, window, scale):
        return attend(q, k, v, encoding=cope, window=window, scale=scale)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for given in ((q, 3, 0.5), (q[:, 1:], 2, 0.25)):
        torch.testing.assert_close(compiled(*given), layer(*given))
    given = (q, np.int64(2), np.float32(0.25))
    torch.testing.assert_close(layer(*given), layer(q, 2, 0.25))


def test_the_operators_keep_the_rules_of_pytorch(cope):
    q, k, v, _ = tensors(dtype=torch.float32)
    names = ("q_BLHK", "k_BMGK", "v_BMGK", "parameter table")
    key = json.dumps(["attend", cope.spec, names, {}, [0, 1, 2, 3]])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch_op.run, ([q, k, v, cope.table], key), test_utils=tests)


def test_the_same_threads_may_run_both_libraries(cope):
    q, k, v, _ = tensors(dtype=torch.float32)
    with torch.no_grad():
        expected = attend(q, k, v, encoding=cope)
        for _ in range(3):
            torch.randn(200, 200) @ torch.randn(200, 200)
            torch.testing.assert_close(attend(q, k, v, encoding=cope), expected)


@pytest.mark.parametrize("batch, length", [(0, 5), (2, 0)])
def test_no_tokens(batch, length, cope):
    q, k, v, _ = tensors(length, batch, torch.float32)
    out = attend(q, k, v, encoding=cope)
    assert out.shape == q.shape
    assert all(not x.any() for x in gradients(out, q, k, v, cope.table))


def test_a_module_is_an_ordinary_module():
    torch.manual_seed(0)
    module = Encoding("cope+fox", cope={"npos_max": 8}, num_heads=2, head_dim=4)
    torch.manual_seed(0)
    again = Encoding("cope(npos_max=8)+fox", num_heads=2, head_dim=4)
    assert list(module.state_dict()) == ["cope.table", "fox.bias", "fox.kernel"]
    torch.testing.assert_close(dict(again.state_dict()), dict(module.state_dict()))
    module.cope.table.data += 1
    again.load_state_dict(module.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(again)).cope.table, module.cope.table)
    assert {x.dtype for x in module.bfloat16().parameters()} == {torch.bfloat16}
    assert "cope({'npos_max': 8})+fox" in repr(module)


def test_parameters_are_those_that_pytorch_makes():
    q, k, v, _ = tensors(dtype=torch.float32)
    module = encoding_of(SPEC, torch.float32)
    torch.nn.init.normal_(module.table)
    expected = module(q, k, v)
    torch.nn.utils.parametrizations.weight_norm(module, "table")
    torch.testing.assert_close(module(q, k, v), expected)
    gradients(module(q, k, v), *module.parameters())
    with torch.device("meta"):
        module = Encoding(SPEC, num_heads=4, num_kv_heads=2, head_dim=4)
    out = module(*(x.to("meta") for x in (q, k, v)))
    assert (out.shape, out.device.type) == (q.shape, "meta")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own
def test_what_has_no_derivative_is_one_line(cope):
    q, k, v, _ = tensors(dtype=torch.float32)

    def call(q):
        return attend(q, k, v, encoding=cope)

    with forward_ad.dual_level():
        with pytest.raises(ConfigError, match=r"q_BLHK has a tangent, but .* no forward mode: use"):
            call(forward_ad.make_dual(q.detach(), q.detach()))
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(ConfigError, match="none of the transforms of torch"):
            transform(lambda q: call(q[None] if q.ndim == 3 else q).sum())(q.detach())
    frozen = encoding_of("alibi", torch.float32)
    for out in (call(q).square(), attend(q, k, v, encoding=frozen)):
        (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(ConfigError, match="has first derivatives only"):
            first.sum().backward()


def test_a_dropped_program_is_made_again(cope):
    q, k, v, _ = tensors(dtype=torch.float32)
    expected = gradients(attend(q, k, v, encoding=cope), q, k, v, cope.table)
    out = attend(q, k, v, encoding=cope)
    torch_op._program.cache_clear()
    torch.testing.assert_close(gradients(out, q, k, v, cope.table), expected)


def test_numbers_of_numpy_are_options():
    module = Encoding("cope", num_heads=np.int64(2), head_dim=4, npos_max=np.int32(8))
    assert module.spec == Encoding("cope", num_heads=2, head_dim=4, npos_max=8).spec
    for options, name in (({"npos_max": torch.tensor(8)}, "npos_max"), ({}, "head_dim")):
        with pytest.raises(ConfigError, match=rf"^{name} must not be a .* pass {name}\.item\(\)$"):
            Encoding("cope", num_heads=2, **{"head_dim": torch.tensor(4)} | options)


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"dtype": torch.float16}], ids=str)
def test_device_and_type_are_not_options(option):
    with pytest.raises(ConfigError, match=rf"{next(iter(option))} is no option of an encoding: cr"):
        Encoding("cope", num_heads=2, head_dim=4, **option)


def test_an_option_is_given_once():
    with pytest.raises(ConfigError, match=r": npos_max is in the name and an argument too: give"):
        Encoding("cope(npos_max=8)", num_heads=2, head_dim=4, npos_max=16)


def test_an_encoding_of_the_input():
    learned = Encoding("learned", num_heads=2, head_dim=4, max_length=5)
    x, positions = torch.zeros(1, 3, 8), torch.tensor([[0, 4, 1]])
    with pytest.raises(ConfigError, match=r"positions_BL must be a tensor, got \[0, 4, 1\]"):
        learned.embed(x, [0, 4, 1])
    for outside in (-1, 5):
        with pytest.raises(ConfigError, match=rf"position {outside} is outside of the learned"):
            learned.embed(x, torch.tensor([[0, outside, 1]]))
    embedded = learned.embed(x, positions)
    assert torch.equal(embedded, learned.table[positions])
    (gradient,) = gradients(embedded, learned.table)
    assert gradient.sum(1).tolist() == [8, 8, 0, 0, 8]
    plain = Encoding("alibi", num_heads=2, head_dim=4).embed(x, positions)
    assert torch.equal(plain, x) and plain.data_ptr() != x.data_ptr()
    with pytest.raises(ConfigError, match="learned has a table with a row for each whole number"):
        learned.embed(x, positions + 0.5)
    waves = Encoding("sinusoidal", num_heads=2, head_dim=4).embed(x, positions + 0.5)
    torch.testing.assert_close(waves[..., 0], torch.sin(positions + 0.5))


Q = torch.zeros(1, 3, 4, 4)
K = V = torch.zeros(1, 3, 2, 4)
WRONG = {
    "an encoding of JAX": (
        (Q, K, V),
        {"encoding": "cope"},
        "encoding must be a cope_jax.torch.Encoding",
    ),
    "an array": (
        (Q, K, np.zeros((1, 3, 2, 4))),
        {},
        r"v_BMGK must be a tensor, torch.from_numpy\(v_BMGK\), got numpy float64\[1, 3, 2, 4\]",
    ),
    "a name of PyTorch": ((Q, K, V), {"is_causal": True}, "no option is_causal: use causal, which"),
    "no such name": (
        (Q, K, V),
        {"windw": 3},
        "unknown option of attend 'windw': did you mean 'window'",
    ),
    "a mask of whole numbers": (
        (Q, K, V),
        {"mask": torch.ones(1, 1, 3, 3, dtype=torch.int64)},
        "mask must be boolean.*; convert it to booleans",
    ),
    "a number as key": ((Q, K, V), {"dropout_key": 0}, r"must be a tensor, such as torch.tensor\("),
    "a key of three": (
        (Q, K, V),
        {"dropout_key": torch.tensor([1, 2, 3])},
        r"dropout_key must be two integers, got torch int64\[3\]",
    ),
    "a key of fractions": (
        (Q, K, V),
        {"dropout_key": torch.tensor([1.0, 2.0])},
        r"dropout_key must be two integers, got torch float32\[2\]",
    ),
    "two devices": ((Q, K.to("meta"), V), {}, "k_BMGK is on meta, and q_BLHK is on cpu: move"),
    "integers": ((Q.long(), K, V), {}, "floating-point numbers, but q has int64"),
    "a parameter on another device": (
        [x.to("meta") for x in (Q, K, V)],
        {},
        "parameter table is on cpu, and q_BLHK is on meta: move",
    ),
    "a learned scale": (
        (Q, K, V),
        {"scale": torch.ones((), requires_grad=True)},
        r"scale must not be a tensor, as it gets no gradient: pass scale\.item",
    ),
    "conditions as positions": (
        (Q, K, V),
        {"q_positions": torch.zeros(1, 3, dtype=torch.bool)},
        "q_positions must be integers or real numbers",
    ),
    "numbers as a mask": ((Q, K, V), {"mask": torch.zeros(1, 1, 3, 3)}, "mask must be boolean"),
    "no batch": ((Q[0], K, V), {}, "needs 4 axes each"),
    "other heads": ((K, K, V), {}, "but q and k have"),
    "no such implementation": (
        (Q, K, V),
        {"implementation": "flash"},
        "unknown implementation 'flash'",
    ),
    "a list as implementation": ((Q, K, V), {"implementation": ["full"]}, "unknown implementation"),
    "a key of bits": (
        (Q, K, V),
        {"dropout_key": torch.tensor([True, False])},
        r"dropout_key must be two integers, got torch bool\[2\]",
    ),
    "several devices": ((Q, K, V), {"implementation": "ring"}, "from auto, blockwise, full, fused"),
    "text": ((Q, K, V), {"window": "3"}, "window must be int or None"),
    "a complex number": ((Q, K, V), {"scale": 1j}, "scale must be float, got 1j of type complex"),
    "a tensor in a list": ((Q, K, V), {"blocks": [torch.tensor(4)] * 3}, "blocks must not be a t"),
    "a sparse tensor": ((Q.to_sparse(), K, V), {}, r"layout torch\.sparse_coo: pass q_BLHK\.to_de"),
    "another layout": ((Q, K.to_mkldnn(), V), {}, r"layout torch\._mkldnn: pass k_BMGK\.to_dense"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name, cope):
    given, options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as error:
        attend(*given, **{"encoding": cope, **options})
    assert "\n" not in str(error.value)


@every(encodings.names(), few={"learned"})
def test_an_encoding_that_lacks_something_says_what(spec):
    encoding = encoding_of(spec, torch.float32)
    facts = encoding.facts()
    q, k, v, _ = tensors(dtype=torch.float32)
    if facts.reads_x:
        with pytest.raises(ConfigError, match="pass x to attend"):
            attend(q, k, v, encoding=encoding)
    if facts.embeds_input:
        with pytest.raises(ConfigError, match=re.escape("call encoding.embed(x, positions)")):
            attend(q, k, v, encoding=encoding)


def test_numbers_of_over_32_bits_are_refused(cope):
    q, k, v, _ = tensors(dtype=torch.float32)
    positions = torch.arange(q.shape[1])[None] + 2**32
    learned = Encoding("learned(max_length=8)", num_heads=4, head_dim=8)
    for wrong, message in (
        (positions, "positions_BL must fit into 32 bits, got 4294967296 to"),
        (positions > 0, "positions_BL must be numbers, got booleans"),
    ):
        with pytest.raises(ConfigError, match=message):
            learned.embed(torch.zeros(1, q.shape[1], 32), wrong)
    with pytest.raises(ConfigError, match="q_positions must fit into 32 bits, got 4294967296 to"):
        attend(q, k, v, encoding=cope, q_positions=positions)
