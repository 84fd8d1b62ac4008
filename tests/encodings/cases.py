"""The cases of the common suite: an encoding's text, its random parameters, and its oracle."""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings, testing
from cope_jax.encodings import Composed, Encoding, Tokens
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.encodings import ORACLES, Rule, Sizes, compose

# Every registered name, every value of every option, and compositions. A new encoding adds lines
# here, and an oracle.
CASES = [
    "none",
    "learned",
    "learned(max_length=14)",
    "sinusoidal",
    "sinusoidal(base=100)",
    "relative",
    "relative(max_distance=3,beyond=clip)",
    "relative(max_distance=3,beyond=nothing)",
    "relative(max_distance=4,scale_position_logits=True)",
    "relative(max_distance=3,signed=True)",
    "relative(max_distance=3,signed=True,beyond=nothing)",
    "rope",
    "rope(base=100)",
    "rope(fraction=0.5)",
    "rope(base=100,llama3=(8,1,4,20))",
    "alibi",
    "alibi(slopes=(0.5,0.0,2.0,0.1))",
    "t5",
    "t5(num_buckets=6,max_distance=9)",
    "t5(num_buckets=8,max_distance=5,bidirectional=True)",
    "kerple",
    "fire",
    "fire(hidden=4,threshold=12.0)",
    "rope(bands=0.5,decay=32.0)",
    "rope(longest=40.0,interpolation=4.0,magnitude=1.5)",
    "rope(ntk=4.0)",
    "rope(base=100,yarn=(4,40,1,4))",
    "rope(base=100,yarn=(4,400),yarn_ramp=bands)",
    "rope(longrope=(1.0,3.5))",
    "rope(clip=2)",
    "pope",
    "pope(base=100,phase=uniform)",
    "learned_sink",
    "ssmax",
    "rope+ssmax",
    "scale_invariant",
    "scale_invariant(tau=2.0)",
    "rope(bands=0.5)+scale_invariant",
    "fox",
    "fox(bias=5.0,stddev=0.1,prune=90.0)",
    "fox(gate=head,longest=16.0)",
    "cable",
    "cable(form=code)",
    "carope",
    "carope(values=True)",
    "grape",
    "grape(base=100,step=1.0,per_head=True,values=True)",
    "grape_additive",
    "grape_additive(gate=query)",
    "mapformer",
    "mapformer(rank=1,world=16.0,fastest=3.0)",
    "mapformer(values=True)+alibi",
    "selective_rope",
    "selective_rope(rank=2,width=0,bias=True,gate=True)",
    "selective_rope(rank=0,values=True)",
    "selective_rope(silu=True,width=2,temperature=rfa,theta=0.6,largest=2.0)",
    "path",
    "path(rank=3,width=1,forget=True,bias=1.0)",
    "wall",
    "wall(bias=1.0,stddev=0.5)",
    "darope",
    "darope(base=100,length=24,alpha=1.0)",
    "repo",
    "repo(base=100,hidden=3)",
    "repo(position=given)",
    "stick_breaking",
    "stick_breaking(see_itself=True,remainder=own)",
    "tra",
    "row_fox",
    "row_fox(width=2)",
    "row_fox(gate=query_key)",
    "cope_signed(npos_max=4)",
    "cope_signed(npos_max=2,scale_position_logits=True)",
    "dape(hidden=4)",
    "dape(hidden=4,keys=3)",
    "selective",
    "cope",
    "cope(npos_max=3)",
    "cope(npos_max=4,gate=separate_key)",
    "cope(npos_max=4,gate=value)",
    "cope(npos_max=4,scale_position_logits=True)",
    "cope(position=slope)",
    "cope(position=slope,slope=0.25,gate=value)",
    "cope(position=learned_slope)",
    "cope(npos_max=4,position=mlp,hidden=7)",
    "cope_two_sided(npos_max=4)",
    "cope_two_sided(npos_max=3,share_table=True,scale_position_logits=True)",
    "cope(npos_max=4)+rope",
    "cope_two_sided(npos_max=3)+rope",
    "cope(npos_max=4)+relative(max_distance=5)",
    "learned+cope(npos_max=4,gate=separate_key)",
    "cope(position=slope,gate=separate_key)+rope(fraction=0.5)+kerple",
]
# One of each kind of hook. The rest is slow where a test is; values and gradients are tested for
# all cases.
FEW = {
    "learned",  # acts on the input
    "relative(max_distance=3,beyond=clip)",  # distances
    "cope(npos_max=4,gate=separate_key)",  # gates of pairs, which saturate
    "cope_two_sided(npos_max=4)",  # one block of keys
    "cope(npos_max=4)+rope",  # a composition, with rotations
    "fox",  # features with a state
    "carope(values=True)",  # rotated values
    "stick_breaking",  # a sink, and done
    "path",  # its own products
    "dape(hidden=4)",  # heads that depend on each other
}
# Of these, one of each kind of carry, for what other suites test in their own way for all of a few.
FEWEST = {"cope(npos_max=4)+rope", "fox", "stick_breaking", "path"}


def _first(name: str) -> str:
    for spec in CASES:
        if spec.partition("(")[0] == name:
            return spec
    raise LookupError(
        f"{name} has no case: add lines to CASES of tests/encodings/cases.py that use every option"
    )


FIRSTS = {_first(name) for name in encodings.names()}


def every(specs: Iterable[str] = CASES, few: Collection[str] = CASES) -> Any:
    """Parametrizes a test by specs, slow unless they are of a few; each in a group, whose worker
    compiles it once.
    """
    marks = {
        spec: [pytest.mark.xdist_group(spec), *([] if spec in few else [pytest.mark.slow])]
        for spec in specs
    }
    return pytest.mark.parametrize(
        "spec", [pytest.param(spec, id=spec, marks=marks[spec]) for spec in specs]
    )


SIZES = Sizes(heads=4, kv_heads=2, head_dim=4, model_dim=8, max_length=12)
BATCH, LENGTH = 2, 6
# Halves the compile time, which is most of the suite's.
CONSECUTIVE = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
GAPPED = np.array([[0, 1, 4, 5, 9, 11], [2, 3, 5, 6, 7, 10]], np.int32)
ONE_SEGMENT = np.zeros((BATCH, LENGTH), np.int32)


class Result(NamedTuple):
    """The embedded input, the output of attention, and the gradients of both."""

    embedded: Any
    out: Any
    gradients: Any


def build(
    spec: str, seed: int = 0, sizes: Sizes = SIZES, dtype: Any = np.float64
) -> tuple[nnx.GraphDef, nnx.State]:
    """The encoding, every parameter random: a table that starts at zero would hide its gradient."""
    graphdef, state = _built(spec, seed, sizes, np.dtype(dtype), jax.config.jax_enable_x64)
    return graphdef, jax.tree.map(lambda leaf: leaf, state)


@functools.cache
def _built(
    spec: str, seed: int, sizes: Sizes, dtype: Any, x64: bool
) -> tuple[nnx.GraphDef, nnx.State]:
    del x64  # part of the key: constants of encodings depend on it
    encoding = nnx.eval_shape(
        lambda: encodings.create(spec, **_arguments(sizes), rngs=nnx.Rngs(seed))
    )
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(encoding)

    def random(path, leaf):
        return np.array(rng.normal(scale=0.7, size=leaf.shape), dtype)

    plain = jax.tree_util.tree_map_with_path(random, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, plain)
    return graphdef, state


def splits_keys(spec: str) -> bool:
    """True if the keys can be split into blocks."""
    whole = {"cope_two_sided", "selective"}
    return not any(name in whole or options.get("keys", 1) > 1 for name, options in parts(spec))


def goes_around(spec: str) -> bool:
    """True if ring attention takes it: no state passes from block to block of keys."""
    return splits_keys(spec) and not {"path", "wall"} & set(dict(parts(spec)))


def splits_queries(spec: str) -> bool:
    """True if the rows do not depend on each other."""
    return "selective" not in dict(parts(spec))


def splits_heads(spec: str) -> bool:
    """True if the heads do not depend on each other."""
    return not {"dape", "selective"} & set(dict(parts(spec)))


def parts_of(encoding: Encoding) -> list[Encoding]:
    """The parts of a composition, or the encoding itself."""
    return list(encoding.parts.values()) if isinstance(encoding, Composed) else [encoding]


def _arguments(sizes: Sizes) -> dict[str, int]:
    return dict(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        model_dim=sizes.model_dim,
        max_length=sizes.max_length,
    )


@functools.cache
def parts(spec: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """(name, options) of each part."""
    return encodings.EncodingConfig.parse(spec).parts


def parameters(state: nnx.State) -> dict[str, np.ndarray]:
    """The parameters by path, such as "table", or "cope/table" in a composition."""
    named = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    learned = {name: leaf[...] for name, leaf in named.items() if leaf.dtype != jax.dtypes.float0}
    return {name: np.asarray(array, np.float64) for name, array in learned.items()}


def rule_of(spec: str, named: Mapping[str, np.ndarray], sizes: Sizes = SIZES) -> Rule:
    """The oracle of an encoding with these parameters; a model has the name of a single one in
    their paths too.
    """
    rules, alone = [], len(parts(spec)) == 1
    for index, (name, options) in enumerate(parts(spec)):
        parameters_of_one = {
            path.removeprefix(f"{name}/"): value
            for path, value in named.items()
            if alone or path.startswith(f"{name}/")
        }
        options = {
            option: value for option, value in options.items() if (name, option) not in SIZE_OPTIONS
        }
        rows = dict(parts(spec)[index][1]).get("max_length") if name == "learned" else None
        if name not in ORACLES:
            raise LookupError(
                f"{name} has no oracle: add it to ORACLES in tests/oracle/encodings.py"
            )
        rules.append(
            ORACLES[name](
                parameters_of_one, sizes._replace(max_length=rows) if rows else sizes, **options
            )
        )
    return compose(rules)


SIZE_OPTIONS = {("learned", "max_length")}  # an option that only replaces a size


def problem(
    seed: int = 0,
    batch: int = BATCH,
    length: int = LENGTH,
    sizes: Sizes = SIZES,
    dtype: Any = np.float64,
) -> dict[str, np.ndarray]:
    """Random x, q, k, v, and cotangents of the two results."""
    rng = np.random.default_rng(seed)
    heads, groups, width = sizes.heads, sizes.kv_heads, sizes.head_dim
    shapes = {
        "x": (batch, length, sizes.model_dim),
        "q": (batch, length, heads, width),
        "k": (batch, length, groups, width),
        "v": (batch, length, groups, width),
        "dembedded": (batch, length, sizes.model_dim),
        "dout": (batch, length, heads, width),
    }
    return {name: rng.normal(scale=1.2, size=shape).astype(dtype) for name, shape in shapes.items()}


def features_of(
    encoding: Encoding, x: Any, q: Any, k: Any, v: Any, positions: Any = None, segments: Any = None
) -> Any:
    """The features of all tokens, by default at consecutive positions."""
    positions = np.arange(k.shape[1], dtype=np.int32)[None] if positions is None else positions
    return encoding.features(Tokens(x, q, k, v, positions, segments), None)[0]


def forward(graphdef, state, arrays, positions, segments, **options) -> tuple[Any, Any]:
    """Uses an encoding as a model does: embeds x, takes features of it, and attends."""
    encoding = nnx.merge(graphdef, state)
    embedded = encoding.embed(arrays["x"], positions)
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    out = attention.attend(
        q,
        k,
        v,
        encoding=encoding,
        x=embedded,
        embedded=True,
        q_positions=positions,
        k_positions=positions,
        q_segment_ids=segments,
        k_segment_ids=segments,
        implementation="full",
        **options,
    )
    return embedded, out


@functools.cache
def compiled(spec: str) -> tuple[Any, list[int]]:
    """One jitted function (state, arrays, positions, segments) -> Result, and a list that grows at
    each trace.
    """
    graphdef, _ = build(spec)
    traces: list[int] = []

    @jax.jit
    def run(state, arrays, positions, segments):
        traces.append(len(traces))
        inputs = {name: arrays[name] for name in ("x", "q", "k", "v")}
        results, pull = jax.vjp(
            lambda s, a: forward(graphdef, s, a, positions, segments), state, inputs
        )
        return Result(*results, pull((arrays["dembedded"], arrays["dout"])))

    return run, traces


def run(spec: str, state, arrays, positions=CONSECUTIVE, segments=ONE_SEGMENT) -> Result:
    """Value and gradients under jit, as NumPy; the gradients by name, those of parameters by path."""
    result = compiled(spec)[0](state, arrays, positions, segments)
    return numpy_result(result)


def numpy_result(result: Result) -> Result:
    """The same as NumPy arrays, the gradients in one flat dict."""
    dstate, dinputs = result.gradients
    gradients = {name: np.asarray(leaf) for name, leaf in dinputs.items()} | parameters(dstate)
    return Result(np.asarray(result.embedded), np.asarray(result.out), gradients)


def laws(spec: str, names: Iterable[str], tolerance: float, **choices: Any) -> testing.Report:
    """Laws of `cope_jax.testing`, measured by the compiled function that all tests of a case share.

    The outputs are those of attention and the embedded input; gradients are also by parameters.
    """
    _, state = build(spec)

    def result(arrays, douts, positions=CONSECUTIVE, segments=ONE_SEGMENT):
        named = dict(zip("qkvx", arrays, strict=True)) | douts
        return run(spec, state, named, positions, segments)

    def outputs(*arrays, **data):
        zeros = {"dout": 0 * arrays[0], "dembedded": 0 * arrays[3]}
        both = result(arrays, zeros, **data)
        return np.concatenate([both.out.reshape(BATCH, LENGTH, -1), both.embedded], axis=-1)

    def gradients(arrays, douts, **data):
        dout, dembedded = np.split(douts, [-SIZES.model_dim], axis=-1)
        douts = {"dout": dout.reshape(arrays[0].shape), "dembedded": dembedded}
        by_name = result(arrays, douts, **data).gradients
        return {"qkvx".index(name) if name in "qkvx" else name: g for name, g in by_name.items()}

    def draw(rng, batch, length):
        arrays = problem(int(rng.integers(2**31)), batch, length)
        return tuple(arrays[name] for name in "qkvx")

    return testing.check(
        outputs,
        testing.Inputs(draw, tuple("qkvx")),
        gradients=gradients,
        segments="segments",
        positions="positions",
        batch=BATCH,
        length=LENGTH,
        tolerance=tolerance,
        laws=names,
        **choices,
    )


def expected(
    spec: str, named, arrays, positions=CONSECUTIVE, segments=ONE_SEGMENT, example: int = 0
) -> tuple[Any, Any]:
    """The oracle's embedded input and output for one example of the batch."""
    rule, places = rule_of(spec, named), positions[example]
    x = np.stack(
        [
            rule.embed(row, position)
            for row, position in zip(arrays["x"][example], places.tolist(), strict=True)
        ]
    )
    out = oracle_attention(
        arrays["q"][example],
        arrays["k"][example],
        arrays["v"][example],
        rule,
        x_MD=x,
        q_positions=places,
        k_positions=places,
        q_segments=segments[example],
        k_segments=segments[example],
    )
    return x, out
