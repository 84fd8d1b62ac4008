import pytest
from absl import flags

from experiments.cli.entry import renamed


@pytest.fixture
def values():
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "", flag_values=values, required=True)
    flags.DEFINE_integer("sample_seed", 0, "", flag_values=values)
    flags.DEFINE_list("models", [], "", flag_values=values)
    for old, new in (("workdir", "model"), ("seed", "sample_seed"), ("elmo", "models"), ("bert", "models")):
        renamed(old, new, values)
    return values


def test_an_old_name_sets_the_new_flag_with_one_line(values, capsys):
    values(["command", "--workdir=runs/cope", "--seed", "3"])
    assert (values.model, values.sample_seed, values.models) == ("runs/cope", 3, [])
    assert capsys.readouterr().err.splitlines() == [
        "warning: --workdir is now --model; the next release removes the old name",
        "warning: --seed is now --sample_seed; the next release removes the old name",
    ]


def test_new_names_say_nothing_and_old_ones_add_to_a_list(values, capsys):
    values(["command", "--model=a", "--models=x,y"])
    assert (values.model, values.models, capsys.readouterr().err) == ("a", ["x", "y"], "")
    values.unparse_flags()
    values(["command", "--model=a", "--elmo=x", "--bert=y"])
    assert values.models[-2:] == ["x", "y"]


def test_a_wrong_value_is_still_an_error(values):
    with pytest.raises(flags.Error, match="model"):
        values(["command"])
    with pytest.raises(flags.Error, match="seed"):
        values(["command", "--model=a", "--seed=x"])


def test_commands_take_old_names(start):
    done = start("generate", "--workdir=nowhere", "--seed=1", "--prompt=The").wait()
    assert (done.status, done.err.count("warning: --")) == (2, 2) and "nowhere" in done.error
    done = start("tag", "--elmo=nowhere", "--bert=nowhere", "--workdir=nowhere").wait()
    assert (done.status, done.err.count(" is now --models;")) == (2, 2)
    assert done.error.startswith("there is no folder nowhere")
