"""Every encoding is registered, has a case of the common suite, and has an oracle."""

import ast
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
from cope_jax import encodings
from cope_jax.attention import attend
from cope_jax.cli import exits, outputs
from cope_jax.encodings import ENCODINGS, encoding_file
from cope_jax.errors import ConfigError
from tests.encodings.cases import CASES, parts
from tests.oracle.encodings import ORACLES

MACHINERY = {
    "__init__",
    "base",
    "common",
    "compose",
    "encoding_config",
    "encoding_file",
    "reference",
    "rotations",
}


def test_every_name_has_a_case_and_an_oracle():
    covered = {name for spec in CASES for name, _ in parts(spec)}
    assert set(encodings.names()) == covered, (
        "add the encoding to CASES in tests/encodings/cases.py"
    )
    assert set(encodings.names()) == set(ORACLES), (
        "add the encoding to ORACLES in tests/oracle/encodings.py"
    )


def test_every_file_is_registered():
    folder = pathlib.Path(encodings.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - MACHINERY
    registered = {
        encodings.ENCODINGS.get(name).__module__.rpartition(".")[2] for name in encodings.names()
    }
    assert files == registered, "import the new file in cope_jax/encodings/__init__.py"


def test_every_option_has_a_case():
    spoken = {
        (name, option) for spec in CASES for name, options in parts(spec) for option in options
    }
    initial = {
        ("learned", "stddev"),
        ("relative", "stddev"),
        ("t5", "stddev"),
        ("fire", "c"),
        ("fire", "threshold"),
    }
    initial |= {
        ("cable", "stddev"),
        ("carope", "stddev"),
        ("darope", "stddev"),
        ("repo", "stddev"),
        ("ssmax", "scale"),
    }
    for name in encodings.names():
        for option in encodings.ENCODINGS.get(name).Config.__dataclass_fields__:
            assert (name, option) in spoken | initial, f"no case sets {name}.{option}"


def test_the_oracle_is_independent():
    for path in (pathlib.Path(__file__).parents[1] / "oracle").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"jax", "flax", "cope_jax"}, path


@pytest.mark.parametrize(
    "spec, message",
    [
        ("cop", "did you mean 'cope'"),
        ("cope(gates=value)", "did you mean 'gate'"),
        ("cope(gate=key)", "query_key, separate_key, value"),
        ("cope(position=alibi)", "learned_slope, mlp, slope, table"),
        ("cope(npos_max=1)", "at least 2"),
        ("cope(npos_max=2.5)", "must be int"),
        ("cope_two_sided(npos_max=1)", "at least 2"),
        ("cope+rope+cope", "'cope' appears twice"),
        ("relative", "max_distance or max_length"),
        ("relative(max_distance=0)", "at least 1"),
        ("relative(max_distance=4,beyond=zero)", "clip, nothing"),
        ("learned", "max_length"),
        ("learned(max_length=-1)", "at least 1"),
        ("rope(base=1e400)", "rope.base must be finite, got inf"),
        ("sinusoidal(base=1e400)", "sinusoidal.base must be finite, got inf"),
        ("rope(fraction=0.0)", "fraction"),
        ("rope(fraction=1.5)", "fraction"),
        ("rope(fraction=0.25)", "fraction"),
        ("rope(llama3=(8,1,4))", "(factor, low, high, length)"),
        ("rope(llama3=(8,4,4,512))", "0 < low < high"),
        ("rope(llama3=(0.5,1,4,512))", "factor ≥ 1"),
        ("alibi(slopes=(1.0,2.0))", "2 entries for 4 heads"),
        ("t5(num_buckets=1)", "num_buckets"),
        ("t5(num_buckets=32,max_distance=16)", "max_distance"),
        ("t5(num_buckets=7,max_distance=16,bidirectional=True)", "even num_buckets"),
        ("fire(hidden=0)", "hidden"),
        ("rope(bands=1.5)", "rope.bands must lie in [0, 1]"),
        ("rope(decay=0)", "rope.decay must be at least 1, got 0"),
        ("rope(base=1e-30)", "rope.base must be at least 2, got 1e-30"),
        ("rope(base=1e300)", "rope.base must be finite in float32, got 1e+300"),
        ("rope(interpolation=0.5)", "rope.interpolation must be at least 1, got 0.5"),
        ("rope(ntk=1e-30)", "rope.ntk must be at least 1, got 1e-30"),
        (
            "rope(ntk=2,fraction=0.5)",
            "rope.ntk has no effect on one pair of features, fraction=0.5 of head_dim=4: give a",
        ),
        ("rope(longest=6.2)", "rope.longest must be above 2π"),
        ("rope(clip=1)", "rope.clip must be from 2 to 2, the number of bands, got 1"),
        ("rope(clip=3)", "rope.clip must be from 2 to 2, the number of bands, got 3"),
        ("rope(magnitude=1e30)", "rope.magnitude must lie in (0, 1000], got 1e+30"),
        ("sinusoidal(base=1)", "sinusoidal.base must be at least 2, got 1.0"),
        ("darope(base=1,length=8)", "darope.base must be at least 2, got 1.0"),
        ("darope(length=8,stddev=-1)", "darope.stddev must be at least 0, got -1"),
        ("cable(stddev=-1)", "cable.stddev must be at least 0, got -1"),
        ("carope(stddev=-1)", "carope.stddev must be at least 0, got -1"),
        ("repo(base=1)", "repo.base must be at least 2, got 1"),
        ("repo(hidden=0)", "repo.hidden must be at least 1, got 0"),
        ("repo(stddev=-1)", "repo.stddev must be at least 0, got -1"),
        ("fox(stddev=-1)", "fox.stddev must be at least 0, got -1"),
        ("t5(stddev=-1)", "t5.stddev must be at least 0, got -1"),
        ("wall(stddev=-1)", "wall.stddev must be at least 0, got -1"),
        ("cope(hidden=0)", "cope.hidden must be at least 1, got 0"),
        ("grape(base=0.5)", "grape.base must be at least 2, got 0.5"),
        ("grape(step=1e30)", "grape.step must lie in (0, 100], got 1e+30"),
        ("rope(ntk=2,interpolation=2)", "interpolation and ntk exclude each other"),
        ("rope(yarn=(4,))", "rope.yarn must be (factor, length)"),
        ("rope(longrope=(1,2,3))", "2 positive divisors"),
        ("pope(base=0)", "pope.base must be at least 2"),
        ("fox(prune=0)", "fox.prune must be positive"),
        ("fox(longest=1)", "fox.longest must be at least 2"),
        ("row_fox(width=0)", "row_fox.width must be at least 1"),
        ("cope_signed(npos_max=1)", "at least 2"),
        ("cope(position=mlp,hidden=0)", "cope.hidden must be at least 1"),
        ("grape(step=0)", "grape.step must lie in (0, 100]"),
        ("mapformer(fastest=1)", "mapformer.fastest must be above 1"),
        ("darope", "give length or max_length"),
        ("selective_rope(theta=0.5)", "at least 1 with temperature=powers"),
        ("path(width=0)", "path.width must be at least 1"),
        ("dape(keys=2)", "dape.keys must be odd"),
        ("stick_breaking(remainder=mine)", "own, zero"),
        ("rope+path", "path and rope cannot be combined: path excludes what rotates"),
        ("wall+mapformer", "wall and mapformer cannot be combined"),
        ("wall+path", "wall and path each replace q·k: keep only one of them"),
        ("path+fox+wall", "path and wall each replace q·k: keep only one of them"),
        ("pope+rope", "pope and rope cannot be combined"),
        ("ssmax(scale=-1)", "ssmax.scale must be at least 0, got -1"),
        ("scale_invariant(tau=0)", "scale_invariant.tau must be above 0, got 0"),
        ("path+ssmax", "path and ssmax cannot be combined: path excludes what rotates"),
        ("path+scale_invariant", "scale_invariant excludes what changes logits"),
        (
            "cope(gate=value)+mapformer(values=True)",
            "cope and mapformer cannot be combined: cope excludes what turns values",
        ),
        ("carope(values=True)+cope(gate=value)", "cope excludes what turns values"),
        ("stick_breaking+alibi", "stick_breaking excludes what changes logits"),
        (
            "selective_rope(temperature=rfa,theta=0.5,largest=0)",
            "selective_rope.largest must be positive",
        ),
        ("selective_rope(width=-1)", "selective_rope.width must be at least 0, got -1"),
        ("cope(hidden=9)", "cope.hidden has no effect without position=mlp: leave it out"),
        ("cope(slope=0.5)", "cope.slope has no effect without position=slope"),
        (
            "cope(position=learned_slope,scale_position_logits=True)",
            "cope.scale_position_logits has no effect with slopes",
        ),
        ("fox(gate=head,bias=5)", "fox.bias has no effect with gate=head"),
        ("fox(gate=head,stddev=0.5)", "fox.stddev has no effect with gate=head"),
        ("fox(longest=9)", "fox.longest has no effect without gate=head"),
        ("path(bias=3)", "path.bias has no effect without forget"),
        ("repo(position=given,hidden=3)", "repo.hidden has no effect with position=given"),
        ("row_fox(gate=query_key,width=2)", "row_fox.width has no effect with gate=query_key"),
        ("rope(yarn_ramp=bands)", "rope.yarn_ramp has no effect without yarn"),
        ("Cope", "unknown encoding 'Cope': did you mean 'cope'?"),
        ("cope(npos_max)", "write option=value, each option once"),
        ("cope(npos_max=4,npos_max=8)", "cannot read"),
        ("cope+", "cannot read"),
    ],
)
def test_mistakes_are_one_clear_line(spec, message):
    with pytest.raises(ConfigError) as error:
        encodings.create(spec, num_heads=4, head_dim=4, rngs=nnx.Rngs(0))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        "cope(gate=value)+mapformer",
        "cope(gate=separate_key)+mapformer(values=True)",
        "cope(gate=value)+rope",
        "mapformer(values=True)+alibi",
    ],
)
def test_only_turned_values_and_a_gate_of_values_exclude_each_other(spec):
    encodings.create(spec, num_heads=4, head_dim=4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("spec", ["wall+fox", "path+fox"])
def test_an_encoding_that_replaces_the_logits_can_have_a_gate(spec):
    encodings.create(spec, num_heads=4, head_dim=4, rngs=nnx.Rngs(0))


def test_the_largest_step_of_grape_is_100():
    encodings.create("grape(step=100)", num_heads=4, head_dim=4, rngs=nnx.Rngs(0))


ROTATING = ["carope", "darope", "grape", "mapformer", "repo", "rope", "selective_rope"]


@pytest.mark.parametrize("name", ROTATING)
def test_pairs_of_features_need_an_even_width(name):
    with pytest.raises(ConfigError, match=f"{name} needs an even head_dim, got 5"):
        encodings.create(name, num_heads=4, head_dim=5, rngs=nnx.Rngs(0))


def test_options_of_a_part_are_a_dict():
    with pytest.raises(
        ConfigError, match=r"cope\+rope: cope=3 must be a dict of the options of cope"
    ):
        encodings.create("cope+rope", num_heads=4, head_dim=4, cope=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "name, options",
    [
        ("cope(npos_max=8)", {"npos_max": 16}),
        ("cope(npos_max=8)+rope", {"cope": {"npos_max": 16}}),
    ],
)
def test_an_option_is_given_once(name, options):
    with pytest.raises(ConfigError, match=r": npos_max is in the name and an argument too: give"):
        encodings.create(name, num_heads=4, head_dim=4, rngs=nnx.Rngs(0), **options)


OWN = """
from cope_jax.encodings import ENCODINGS, Encoding

@ENCODINGS.register("mine")
class Mine(Encoding):
    "No positions."
"""


@pytest.fixture
def registry(monkeypatch):
    """The registry, which loses after a test what the test has registered."""
    monkeypatch.setattr(ENCODINGS, "_entries", dict(ENCODINGS._entries))


def test_a_file_registers_encodings_and_is_known_by_its_digest(tmp_path, registry):
    file = tmp_path / "json.py"  # hides no module of this name
    file.write_text(OWN)
    assert encodings.load(file) == encodings.load(file) == ("mine",)
    encodings.create("mine+rope", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    kind = ENCODINGS.get("mine")
    assert encodings.load(str(file)) == ("mine",) and ENCODINGS.get("mine") is kind
    assert encoding_file.files("rope") == {}
    (before,) = encoding_file.files("mine+rope").items()
    file.write_text(OWN.replace("No positions", "No position "))  # of the same size, at once
    assert encodings.load(file) == ("mine",) and ENCODINGS.get("mine").__doc__ == "No position ."
    assert ENCODINGS.get("mine") is not kind
    (after,) = encoding_file.files("mine+rope").items()
    assert before[0] == after[0] == str(file) and before[1] != after[1]
    changed = file.read_text()
    for _ in range(2):
        file.write_text(f"{OWN}x = 1 / 0")
        with pytest.raises(ConfigError, match="line 7: ZeroDivisionError"):
            encodings.load(file)
    file.write_text(changed)
    assert encodings.load(file) == ("mine",)
    assert dict([after]) == encoding_file.files("mine")
    file.write_text(changed.replace('"mine"', '"ours"'))
    assert encodings.load(file) == ("ours",) and "mine" not in ENCODINGS
    file.write_text(changed)
    encodings.load(file)
    other = tmp_path / "other.py"
    other.write_text(OWN)
    with pytest.raises(ConfigError, match=r"'mine' is registered already, by .*json\.py"):
        encodings.load(other)


def test_the_file_printed_in_the_readme(tmp_path, registry):
    text = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    block = next(block for block in text.split("```python\n") if block.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(block.partition("```")[0])
    assert encodings.load(tmp_path / "mine.py") == ("logarithm",)
    encodings.create("logarithm(weight=2.0)", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"mine.py registers no encoding: write @ENCODINGS.register\('NAME'\)"),
        ("x = 1\nx = 1 / 0", r"mine.py fails: line 2: ZeroDivisionError: division by zero"),
        ("x = 1\nx = (", r"mine.py fails: line 2: SyntaxError"),
        ("import sys\nsys.exit()", r"mine.py fails: line 2: SystemExit"),
        ("import nothing_of_this_name", r"mine.py fails: line 1: ModuleNotFoundError"),
        (OWN.replace('"mine"', '"rope"'), r"mine.py fails: line 4: ValueError: encoding 'rope'"),
        (OWN.replace('"mine"', '"my own"'), "mine.py registers 'my own': register a subclass"),
        (OWN.replace("(Encoding)", ""), "mine.py registers 'mine': register a subclass"),
    ],
)
def test_a_wrong_file_is_one_line(text, message, tmp_path, registry):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        encodings.load(file)
    assert "\n" not in str(error.value)
    assert not {"mine", "my own"} & {*ENCODINGS}


HOOK = (
    OWN
    + """
    def score(self, pairs, carry):
        return {}
"""
)


@pytest.mark.parametrize("name", ["mine", "mine+rope"])
def test_a_mistake_in_a_hook_of_a_file_is_one_line_in_commands(name, tmp_path, registry, capsys):
    file = tmp_path / "mine.py"
    x = np.ones((1, 3, 2, 4), np.float32)

    def run(result):
        file.write_text(HOOK.format(result))
        encodings.load(file)
        encoding = encodings.create(name, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
        with pytest.raises(SystemExit) as left, exits.clear_errors():
            attend(x, x, x, encoding=encoding)
        assert left.value.code == 2
        return capsys.readouterr().err

    line = "line 9: AttributeError: 'Pairs' object has no attribute 'logit'"
    assert run("pairs.logit, carry") == f"error: the encoding of {file} fails: {line}\n"
    no_pair = "error: score of Mine must return the logits and the carry, a pair\n"
    assert run("pairs.logits") == run("(pairs.logits,)") == no_pair
    for wrong, given in (
        ("pairs.logits.astype('int32')", "int32 [1, 2, 3, 3]"),
        ("pairs.logits.astype('float16')", "float16 [1, 2, 3, 3]"),
        ("pairs.logits.sum()", "float32 []"),
        ("0.5", "float"),
    ):
        logits = "logits of pairs.logits' type and shape, float32 [1, 2, 3, 3]"
        line = f"error: score of Mine must return {logits}, got {given}\n"
        assert run(f"{wrong}, carry") == line


def test_a_parameter_in_float64_may_widen_logits(tmp_path, registry, x64):
    file, x = tmp_path / "mine.py", np.ones((1, 3, 2, 4), np.float32)
    file.write_text(HOOK.format("pairs.logits - self.slope[...] * pairs.distance, carry"))
    encodings.load(file)
    encoding = encodings.create("mine", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    encoding.slope = nnx.Param(np.ones((), np.float64))
    with jax.numpy_dtype_promotion("standard"):
        for how in ("full", "blockwise"):
            assert attend(x, x, x, encoding=encoding, implementation=how).dtype == np.float32


def test_the_next_command_names_the_file(tmp_path, registry, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("mine.py").write_text(OWN)
    encodings.load("mine.py")
    for name, flag in (("mine", " --encoding=mine.py"), ("rope", "")):
        outputs.name_next("runs/x", cj.config("quick", encoding=name))
        assert capsys.readouterr().out == f"next: cope-jax inspect --model=runs/x{flag}\n"


def test_no_python_file_is_one_line(tmp_path):
    (tmp_path / "mine.txt").touch()
    for path in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match=r"is no Python file: give a file NAME\.py"):
            encodings.load(path)
    with pytest.raises(
        ConfigError, match=r"'rope\(base=2.0\)' does not exist.*; --config\.encoding or "
    ):
        encodings.load("rope(base=2.0)")


@pytest.mark.parametrize("name", ["mine", "rop"])
def test_an_unknown_name_is_one_of_a_file_or_like_another(name):
    with pytest.raises(ConfigError) as error:
        encodings.EncodingConfig.parse(name)
    advice = "one of your own needs its file" if name == "mine" else "did you mean 'rope'?"
    assert str(error.value).startswith(f"unknown encoding '{name}': {advice}")
