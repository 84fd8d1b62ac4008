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
    for folder in ("cope_jax", "docs", "experiments", "tools")
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
        shown = re.sub(
            r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
        )
        yield from enumerate(re.sub(r"`[^`\n]*`", "", shown).splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize(
    "folder", sorted({path.parent.relative_to(ROOT).parts[:2] for path in FILES}), ids="/".join
)
def test_words_are_plain(folder):
    mistakes = []
    for path in (path for path in FILES if path.parent.relative_to(ROOT).parts[:2] == folder):
        for line, text in words(path):
            text = re.sub(rf"\b(?:{'|'.join(ALLOWED)})\b", "", " ".join(text.split()))
            for match in re.finditer(rf"\b(?:{'|'.join(BANNED)})\b", text):
                instead = next(
                    better for phrase, better in BANNED.items() if re.fullmatch(phrase, match[0])
                )
                mistakes.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: say {instead}")
    assert not mistakes, "\n".join(mistakes)


EMPTY = {"found", "own", "one", "place", "part", "held", "told", "what", "thing", "ones", "those"}
"""Names of locals that say nothing of what they hold."""

WIDE = 0.02
"""The largest share of lines above 100 columns."""


def unclear(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, mistake) of empty names, beginnings of docstrings, and wide assignments."""
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = {
        id(item.target) for node in classes for item in node.body if isinstance(item, ast.AnnAssign)
    }
    for node in nodes:
        name = getattr(node, "arg" if isinstance(node, ast.arg) else "id", "")
        is_set = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if name in EMPTY and is_set and id(node) not in fields:
            yield node.lineno, f"the name {name!r}: say what it holds"
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(value, ast.Constant):
            if re.match(r"(?:What|Whether|Where|Why|Which|When|How)\b", str(value.value)):
                yield node.lineno, "the docstring asks: say what the thing is or does"
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(value, ast.Tuple)
        ):
            if len(value.elts) >= 5:
                yield node.lineno, f"{len(value.elts)} values in one assignment: write several"


def test_lines_can_be_read():
    """A reader needs names that say something, and lines that fit."""
    mistakes, lines, wide = set(), 0, 0
    for path in (*CODE, *(ROOT / "tests").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        mistakes |= {f"{name}:{line}: {mistake}" for line, mistake in unclear(ast.parse(text))}
        widths = [len(line) for line in text.splitlines()]
        lines, wide = lines + len(widths), wide + sum(width > 100 for width in widths)
    assert not mistakes, "\n".join(sorted(mistakes))
    assert wide <= WIDE * lines, (
        f"{100 * wide / lines:.1f} % of the lines are wider than 100 columns"
    )
