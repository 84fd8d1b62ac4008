"""The verdicts of all laws on one function, as a table."""

import dataclasses
from collections.abc import Iterator

from cope_jax.registry import unknown


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of a law.

    Attributes:
      law: the name of the law.
      verdict: "holds", "BROKEN", "failed" if the function raised an exception, or "not checked".
      error: the worst error, or None.
      bound: the largest error that keeps the law, or None.
      counterexample: where the law is broken, the exception, or what to pass to check the law.
      tokens: (j, i) if token j changes output i, which must not depend on it.
    """

    law: str
    verdict: str
    error: float | None = None
    bound: float | None = None
    counterexample: str = ""
    tokens: tuple[int, int] | None = None

    @property
    def bad(self) -> bool:
        return self.verdict in ("BROKEN", "failed")


@dataclasses.dataclass(frozen=True)
class Report:
    """All verdicts; `print` shows a table, and a Report is True if no law is broken.

    >>> report = Report("f", (Verdict("causality", "BROKEN", 0.5, 1e-5, "token 3 changes output 2"),))
    >>> print(report)
    law        verdict  error   bound
    causality  BROKEN     0.5   1e-05  token 3 changes output 2
    >>> report["causality"].error, bool(report)
    (0.5, False)
    >>> report.raise_if_broken()
    Traceback (most recent call last):
    ...
    AssertionError: f breaks causality: token 3 changes output 2
    """

    name: str
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts of laws that are broken, or in which the function failed."""
        return tuple(verdict for verdict in self.verdicts if verdict.bad)

    def raise_if_broken(self) -> None:
        """Raises AssertionError, with a line for each broken law."""
        if self.broken:
            verbs = {"BROKEN": "breaks", "failed": "fails in"}
            raise AssertionError(
                "\n".join(
                    f"{self.name} {verbs[verdict.verdict]} {verdict.law}: {verdict.counterexample}"
                    for verdict in self.broken
                )
            )

    def __bool__(self) -> bool:
        return not self.broken

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __getitem__(self, law: str) -> Verdict:
        for verdict in self.verdicts:
            if verdict.law == law:
                return verdict
        raise unknown("law", law, [verdict.law for verdict in self.verdicts])

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("law", "verdict", "error", "bound", "")]
        for verdict in self.verdicts:
            numbers = ("" if n is None else f"{n:.2g}" for n in (verdict.error, verdict.bound))
            words = "" if verdict.verdict == "holds" else verdict.counterexample
            rows.append((verdict.law, verdict.verdict, *numbers, words))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = (
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
            f"{row[3]:>{widths[3]}}  {row[4]}"
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)
