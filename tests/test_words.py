"""Plain words: phrases that need a second reading stay out of messages, docstrings and pages."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "experiments" / "RESULTS.md"]
CODE = [
    path
    for folder in ("cope_jax", "experiments", "tools/benchmark", "tools/compile_check")
    for path in (ROOT / folder).rglob("*.py")
]
FILES = [*PAGES, *CODE]

BANNED = {
    r"anew": "again, from scratch",
    r"go(?:es)? on|going on|gone on": "continues, resumes",
    r"beside": "next to, with",
    r"is none|are none(?! of)": "is not a, does not exist",
    r"knows no": "does not support",
    r"(?:is|are) to be": "must be",
    r"has not (?:a|an|the|any|it)": "does not have",
    r"of before|of today": "earlier, current",
    r"in peace": "uninterrupted",
    r"that of those": "name the noun again",
    r"so many": "at most N, K",
    r"nothing but": "only",
    r"of ours|of our own": "our",
    r"stands? (?:at|side|there|behind|before)": "is",
    r"(?:is|was|are) told": "name who says it",
    r"speaks?": "prints, generates",
    r"no word of": "does not mention",
    r"as it stands": "unchanged",
}
"""Phrases, and what to say instead."""

ALLOWED = {
    r"(?:if|there|None if) (?:there )?(?:is|are) none": "if there is none: of the things just named",
    r"None where there are none": "the same",
    r"several of ours": "parameters of ours, against theirs",
}
"""Plain uses of these phrases, and why."""


def words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a page without its code, or of the strings and comments of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        shown = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        yield from enumerate(re.sub(r"`[^`\n]*`", "", shown).splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(ROOT).parts[:2] for path in FILES}), ids="/".join)
def test_words_are_plain(folder):
    mistakes = []
    for path in (path for path in FILES if path.parent.relative_to(ROOT).parts[:2] == folder):
        for line, text in words(path):
            text = re.sub(rf"\b(?:{'|'.join(ALLOWED)})\b", "", " ".join(text.split()))
            for match in re.finditer(rf"\b(?:{'|'.join(BANNED)})\b", text):
                instead = next(better for phrase, better in BANNED.items() if re.fullmatch(phrase, match[0]))
                mistakes.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: say {instead}")
    assert not mistakes, "\n".join(mistakes)
