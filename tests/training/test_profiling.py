import jax
import jax.numpy as jnp
import pytest

from cope_jax.errors import ConfigError
from cope_jax.training.profiling import Profile


@pytest.fixture
def calls(monkeypatch):
    """Replaces the profiler's calls: records starts and stops, and the steps between."""
    calls = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, **options: calls.append("start")
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def run(calls, text, *, steps, start=0, total=60):
    with Profile.parse(text, None) as profile:
        for step in range(start, total, steps):
            profile.at(step, steps)
            calls.append(step)
    return calls


@pytest.mark.slow
def test_a_profile_of_chosen_steps_is_written(tmp_path):
    x = jnp.ones((8, 8))
    with Profile.parse("1:3", tmp_path / "new" / "profile") as profile:
        for number in range(4):
            profile.at(number, 1)
            with jax.profiler.TraceAnnotation(f"step_number_{number}"):
                (x @ x).block_until_ready()
    (file,) = tmp_path.glob("new/profile/plugins/profile/*/*.xplane.pb")
    steps = [number for number in range(4) if f"step_number_{number}".encode() in file.read_bytes()]
    assert steps == [1, 2]


def test_steps_that_end_with_a_dispatch_are_those_alone(calls):
    assert run(calls, "20:40", steps=10) == [0, 10, "start", 20, 30, "stop", 40, 50]


@pytest.mark.parametrize("text", ["21:39", "29:31", "20:31", "29:40"])
def test_a_dispatch_is_profiled_whole(calls, text):
    assert run(calls, text, steps=10) == [0, 10, "start", 20, 30, "stop", 40, 50]


def test_the_end_of_a_run_ends_the_profile(calls):
    assert run(calls, "50:90", steps=10) == [0, 10, 20, 30, 40, "start", 50, "stop"]


def test_an_error_ends_the_profile_once(calls):
    with pytest.raises(KeyError), Profile(0, 10, None) as profile:
        profile.at(0, 1)
        raise KeyError
    assert calls == ["start", "stop"]


def test_a_profile_that_cannot_be_written_is_not_ended_again(calls, monkeypatch):
    def stop():
        calls.append("stop")
        raise OSError("disk full")

    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    with pytest.raises(OSError, match="disk full"):
        run(calls, "0:10", steps=10)
    assert calls == ["start", 0, "stop"]


def test_a_run_that_goes_on_behind_the_steps_has_no_profile(calls):
    assert run(calls, "20:30", steps=10, start=30) == [30, 40, 50]


def test_none_is_no_profile(calls):
    assert run(calls, None, steps=20) == [0, 20, 40]


@pytest.mark.parametrize(
    "text", ["", "100", "110:100", "100:100", "-5:10", "a:b", "1:2:3", "1:2\n", " 1:2", "1.5:2"]
)
def test_nonsense_is_one_clear_line(text):
    with pytest.raises(
        ConfigError, match=r"^cannot profile the steps .*: write FIRST:LAST, .* as in 100:110$"
    ) as error:
        Profile.parse(text, None)
    assert "\n" not in str(error.value)
