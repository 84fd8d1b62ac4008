"""A sample of the random wrong input; and that findings are told."""

import pytest

from tests.commands.commands import Done
from tools.fuzz import __main__ as fuzz
from tools.fuzz.cases import KINDS, Case

pytestmark = pytest.mark.xdist_group("fuzz")


@pytest.mark.slow
def test_a_sample_has_clear_answers(tmp_path):
    results = list(fuzz.run(tmp_path / "fuzz", 0, range(9)))
    assert {case.kind for _, case, _, _ in results} <= set(KINDS) and len(
        {case.kind for _, case, _, _ in results}
    ) > 4
    assert [f"{number}: {case}: {problem}" for number, case, _, problem in results if problem] == []


CASE = Case("fields", "train", (), "steps=nan", absurd=True)
GOOD = "0/4 steps\nerror: do this"


@pytest.mark.parametrize(
    ("done", "problem"),
    [
        (Done(2, "", GOOD), None),
        (Done(4, "", GOOD), None),
        (Done(0, "", ""), "an absurd setting is accepted"),
        (Done(1, "", GOOD), "status 1"),
        (Done(-11, "", ""), "status -11"),
        (
            Done(2, "", "Traceback (most recent call last):\nKeyError: 3"),
            "a traceback: KeyError: 3",
        ),
        (Done(2, "", "error: a\nerror: b"), "not one line"),
        (Done(2, "", "error: a\nand more"), "not one line"),
        (Done(2, "", ""), "not one line"),
    ],
)
def test_a_finding_is_told(done, problem, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz.Command, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(fuzz.Command, "wait", lambda *_, **__: done)
    judged = fuzz.judge(CASE, tmp_path, tmp_path, 1)
    assert judged[0] == done and (
        judged[1] is None if problem is None else judged[1].startswith(problem)
    )


@pytest.mark.parametrize(
    ("said", "status", "problem"),
    [("3/4 steps", 143, None), ("3/4 steps", 1, "status 1"), ("", 143, "it hangs")],
)
def test_a_command_without_progress_hangs(said, status, problem, monkeypatch, tmp_path):
    sent = []

    def wait(self, seconds, kill=True):
        if not sent:
            raise TimeoutError(said)
        return Done(status, "", said)

    monkeypatch.setattr(fuzz.Command, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(fuzz.Command, "wait", wait)
    monkeypatch.setattr(fuzz.Command, "send", lambda self, number: sent.append(number))
    message = fuzz.judge(CASE, tmp_path, tmp_path, 1)[1]
    assert message is None if problem is None else message.startswith(problem)
    assert len(sent) == 1
