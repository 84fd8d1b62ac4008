"""Hooks of mkdocs and griffe: pages that come from other folders or from the code, and links."""

import ast
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from cope_jax import encodings
from cope_jax.evaluation.report import grid_report
from cope_jax.runs.grid import archive, grid_file, search
from cope_jax.runs.grid.cell import entries
from cope_jax.runs.grid.grid import Grid

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
COSTS = (
    "times of a step and of decoding: apart from the runs, see RESULTS.md, What an encoding costs"
)
SOURCE = "https://github.com/cope-jax/cope-jax/blob/main/"
# Pages outside of docs/: where they are in the repository, and in the site.
NOTEBOOKS = [f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
OTHERS = ("CONTRIBUTING.md", "experiments/RESULTS.md", *NOTEBOOKS)
PAGES = {"README.md": "index.md"} | {path: path for path in OTHERS}


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that docs/ does not have."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for path in OTHERS:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    folders = {path.parent.name for path in (ROOT / "cope_jax").glob("*/__init__.py")}
    rooms = sorted(folders - {"cli", "commands", "configs", "grids"})
    for page, lines in (
        ("flags", flags()),
        ("config", configs()),
        *((room, modules(room)) for room in rooms),
    ):
        files.append(File.generated(config, f"reference/{page}.md", content="\n".join(lines)))
    for grid in ("abilities", "abilities_v2"):
        files.append(File.generated(config, f"{grid}.html", content=results(grid)))
    return files


def results(name: str) -> str:
    """The page of a grid, from the archived records of its cells and of encodings that entered it."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder, name)
        archive.unpack(EXPERIMENTS / "results" / f"{name}.tar.xz", Path(folder))
        cells, entered_names = grid_file.read(grid_file.find(name)), []
        for file in sorted((EXPERIMENTS / "entries").glob("*.py")):
            names = encodings.load(file)
            archive.unpack(file.with_suffix(".tar.xz"), Path(folder), names)  # nobody else's cells
            entered_names += names
        entered = entries(cells, entered_names)
        cells += [cell for cell in entered if (cell.folder(workdir) / "result.json").exists()]
        grid = Grid(workdir, [search.recorded(cell, workdir) for cell in cells])
        facts = "; ".join(filter(None, (search.budget(cells), COSTS)))
        _, (page, *_) = grid_report.write_all(grid, grid.state(), facts, costs())
        return page.read_text(encoding="utf-8").replace(folder, "runs")


def costs() -> dict[str, dict[str, float]]:
    """The times of each encoding that the benchmark measured, as multiples of those of `rope`."""
    records = json.loads((EXPERIMENTS / "results" / "costs.json").read_text())["records"]
    names = {"train": "step, rope = 1", "decode": "decoding a token, rope = 1"}
    times: dict[str, dict[str, float]] = {}
    for row in records:
        times.setdefault(row["contender"], {})[names[row["section"]]] = row["ratio"]
    return times


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository lead to their page of the site, or else to their source."""
    in_repository = {page: path for path, page in PAGES.items()}
    here = in_repository.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def target(match: re.Match[str]) -> str:
        begin, link, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
        site = PAGES.get(path, path.removeprefix("docs/"))
        file = files.get_file_from_path(site)
        if file and file.inclusion.is_included():
            folder = posixpath.dirname(page.file.src_uri) or "."
            return f"{begin}{posixpath.relpath(site, folder)}{anchor}"
        return f"{begin}{SOURCE}{path}{anchor}" if (ROOT / path).exists() else match[0]

    if here == "README.md":  # whose links are addresses, because PyPI shows the page too
        markdown = re.sub(
            r"^(\[\w+\]: )\S+/(?:blob|raw)/main/", r"\1", markdown, flags=re.MULTILINE
        )
    links = re.compile(r"(\]\(|^\[\w+\]: )(?!\w+:)([^)#\s]+)(#[^)\s]*)?", re.MULTILINE)
    return links.sub(target, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """The theme would ask GitHub for the numbers of stars; no page needs another host."""
    return output.replace(' data-md-component="source"', "")


class Doctests(griffe.Extension):
    """Shows the examples of docstrings as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Puts each block of `>>>` lines, with what it prints, between fences."""
        if obj.docstring:
            blocks = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +.*)*", re.MULTILINE)
            text = blocks.sub(
                lambda match: f"\n{match[1]}```pycon\n{match[0]}\n{match[1]}```\n",
                obj.docstring.value,
            )
            obj.docstring.value = text


def flags() -> Iterator[str]:
    """Every flag of every command, as its source defines it."""
    yield "# Flags\n\nThe flags of `cope-jax NAME` and `python -m tools.NAME`, then those that"
    yield "commands share. Their configs: [Config](config.md).\n"
    for path in (
        path
        for folder in ("cope_jax/commands", "tools", "cope_jax/cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ):
        tree = ast.parse(path.read_text())
        # A function that defines a flag is called by a command, which has the row.
        code = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
        nodes = [node for statement in code for node in ast.walk(statement)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and _is_flag(node)]
        if calls:
            name = path.parent.name if path.stem == "__main__" else path.stem
            text = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
            yield f"## {name}\n\n{text}\n\n| flag | default | |\n|---|---|---|"
            yield from map(_row, sorted(calls, key=lambda call: call.lineno))
            yield ""


def _is_flag(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr.startswith("DEFINE_")


class _Given(ast.NodeTransformer):
    """Replaces the parameters of a function by what a call gives."""

    def __init__(self, given: dict[str, ast.expr]):
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.given.get(node.id, node)


def _inner(call: ast.Call) -> ast.Call:
    """The definition of a flag that a call of a function of common_flags.py makes."""
    tree = ast.parse((ROOT / "cope_jax" / "cli" / "common_flags.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if call.func.attr not in functions:
        return call
    function = functions[call.func.attr]
    names = [parameter.arg for parameter in function.args.args]
    (definition,) = (
        node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_flag(node)
    )
    return _Given(dict(zip(names, call.args, strict=True))).visit(definition)


def _row(call: ast.Call) -> str:
    call = _inner(call)
    name, *rest = call.args
    values = {"default": rest[0] if rest else None, "help": rest[-1] if len(rest) > 1 else None}
    values |= {keyword.arg: keyword.value for keyword in call.keywords}
    shown = (
        "required"
        if "required" in values
        else ""
        if values["default"] is None
        else ast.unparse(values["default"])
    )
    text = (
        _text(values["help"])
        if values["help"] is not None
        else "Config file, or the name of one in the package."
    )
    default = "" if shown in ("None", repr("")) else f"`{shown}`"
    return f"| `--{ast.literal_eval(name)}` | {default} | {text} |"


def _text(node: ast.expr) -> str:
    """A constant, or what of an f-string or a sum is one."""
    if isinstance(node, ast.Constant):
        return str(node.value).replace("\n", " ").replace("|", "\\|")
    children = node.values if isinstance(node, ast.JoinedStr) else list(ast.iter_child_nodes(node))
    return "".join(_text(child) for child in children if isinstance(child, ast.expr)) or "…"


def configs() -> Iterator[str]:
    """Links to all configs, whose docstrings name their fields."""
    yield "# Config\n\nA flag overrides any field of a config: `--config.training.steps=100`."
    yield "The fields are those of\n"
    for module in (
        "training/experiment_config",
        "layers/block_config",
        "models/*",
        "encodings/*",
        "tasks/*",
    ):
        for path in sorted((ROOT / "cope_jax").glob(f"{module}.py")):
            classes = [
                node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
            ]
            for name in (node.name for node in classes if ast.get_docstring(node)):
                if name.endswith(("Config", "Options")):
                    yield f"- [`{name}`][cope_jax.{path.parent.name}.{path.stem}.{name}]"


def modules(room: str) -> Iterator[str]:
    """Every public name of every module of a package."""
    yield f"# cope_jax.{room}\n"
    for path in sorted((ROOT / "cope_jax" / room).rglob("[!_]*.py")):
        if "samples" not in path.parts:
            yield f"::: {os.path.relpath(path, ROOT).removesuffix('.py').replace(os.sep, '.')}\n"
