"""The page of docs/gates/: its JavaScript computes what the library computes, and it opens."""

import functools
import http.server
import json
import re
import runpy
import shutil
import subprocess
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import cope_jax as cj
from tests.evaluation.browser import browse, needs_browser

PAGE = Path(__file__).parents[3] / "docs" / "gates"
HOOK = runpy.run_path(str(PAGE / "models.py"))
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
MODELS = sorted(HOOK["MODELS"])
TEXTS = {
    "counting": [
        "a = 0 ; pass; a ++; a ++; print a",
        "a = 0 ; pass; a ++; a = 0 ; print a 10",  # the beginning is the same
        "a = 0",
        "pass; " * 100 + "a = 0 ; " + "a ++; " * 9 + "print a",  # longer than in training
    ],
    "shakespeare": [
        "To be, or not",
        "To be, or not to be",
        "T",
        "",
        "naïve 🎭\n\tÆ",
        "ROMEO:\nI do, " * 18,
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All files of the page, as the site has them."""
    folder = tmp_path_factory.mktemp("gates")
    for name, content in HOOK["contents"]().items():
        (folder / name).write_bytes(content)
    for path in [*PAGE.glob("*.js"), *PAGE.glob("*.css")]:
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def loaded():
    return functools.cache(cj.load)


@pytest.fixture(scope="module")
def library(loaded):
    """By name of a model, a function of tokens that returns logits_LV and the maps."""

    @functools.cache
    def function_of(name):
        graph, state = nnx.split(loaded(name).model())

        @jax.jit
        def compiled(tokens_BL):
            with jax.default_matmul_precision("highest"):
                model = nnx.merge(graph, state)
                return model(tokens_BL), model.maps(tokens_BL)

        def function(tokens):  # padded, so that it is compiled once; a token sees nothing later
            count = len(tokens)
            padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, 256 - count)))
            logits_BLV, maps = compiled(padded)
            cut = {name: np.asarray(map)[:, 0, :, :count, :count] for name, map in maps.items()}
            return np.asarray(logits_BLV)[0, :count], cut

        return function

    return function_of


def run(folder, script, **given):
    """The object `result` that a script of ES modules fills."""
    code = f"""
import {{ readFileSync, writeFileSync }} from "node:fs";
const [, , file, out] = process.argv, given = JSON.parse(readFileSync(file)), result = {{}};
const {{ Decoder }} = await import("./forward.mjs"), text = await import("./text.mjs");
const models = JSON.parse(readFileSync("models.json"));
const open = name => {{
  const {{ buffer, byteOffset, byteLength }} = readFileSync(`${{name}}.safetensors`);
  return new Decoder(buffer.slice(byteOffset, byteOffset + byteLength), models[name].config);
}};
{script}
writeFileSync(out, JSON.stringify(result));
"""
    for name in ("forward", "text"):  # without a package.json, Node takes .js for CommonJS
        shutil.copy(folder / f"{name}.js", folder / f"{name}.mjs")
    (folder / "script.mjs").write_text(code)
    (folder / "given.json").write_text(json.dumps(given))
    command = [NODE, "script.mjs", "given.json", "result.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())


SCRIPT = """
const decoder = open(given.name), numbers = count => [...Array(count).keys()];
result.texts = given.texts.map(line => {
  const { tokens, labels } = text.encode(models[given.name], line), maps = { gates: [], positions: [], attention: [] };
  decoder.read(tokens);
  const logits = numbers(tokens.length).map(query => [...decoder.logits(query)]);
  if (tokens.length > 64) return { tokens, labels, logits, maps: {} }; // the maps are large
  for (const layer of numbers(decoder.layers.length)) for (const head of numbers(decoder.heads))
    for (const query of numbers(tokens.length))
      for (const [name, row] of Object.entries(decoder.maps(layer, head, query)))
        maps[name].push(...row, ...Array(tokens.length - row.length).fill(0));
  return { tokens, labels, logits, maps };
});
"""


@needs_node
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "counting")) for name in MODELS],
)
def test_the_page_computes_the_logits_and_maps_of_the_library(name, folder, loaded, library):
    codec = loaded(name).codec
    shown = run(folder, SCRIPT, name=name, texts=TEXTS[name])["texts"]
    for text, seen in zip(TEXTS[name], shown, strict=True):
        tokens = [*codec.begin, *codec.encode(text).tolist()]
        assert (seen["tokens"], len(seen["labels"])) == (tokens, len(tokens))
        logits_LV, maps = library(name)(tokens)
        np.testing.assert_allclose(seen["logits"], logits_LV, rtol=0, atol=1e-4)
        assert set(seen["maps"]) == (set(maps) if len(tokens) <= 64 else set())
        for kind, numbers in seen["maps"].items():
            map_NHLL = np.tril(maps[kind])
            actual = np.reshape(numbers, map_NHLL.shape)
            np.testing.assert_allclose(actual, map_NHLL, rtol=0, atol=1e-4, err_msg=kind)


@pytest.fixture
def address(folder):
    """The address of a server of the folder."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


STEPS = """
const byId = name => document.getElementById(name), wait = async ready => {
  for (let i = 0; i < 300 && !ready(); i++) await new Promise(done => setTimeout(done, 100));
};
const tokens = () => all(".token").map(node => node.firstChild.textContent);
const says = () => byId("says").textContent, status = () => byId("gates-status").textContent;
const type = text => { byId("gates-text").value = text; byId("gates-text").dispatchEvent(new Event("input")); };
const press = text => all(".row button").find(node => node.textContent.startsWith(text)).click();
await wait(() => all(".token").length);
found.answer = says(); found.heads = all(".head").length;
type("a=0;a++;pass"); found.unfinished = [tokens(), status()];
type(""); found.empty = [...["view", "next"].map(name => getComputedStyle(byId(`gates-${name}`)).display), status()];
for (const key of ["a = 0 ;", "a ++;", "pass;", "print a", "⌫"]) press(key);
found.pressed = byId("gates-text").value;
byId("gates-next").firstChild.click(); found.added = byId("gates-text").value;
all(".token")[3].dispatchEvent(new Event("mouseenter")); found.pointed = says();
all(".token")[3].parentNode.dispatchEvent(new Event("mouseleave")); found.left = says();
all(".token")[3].click(); found.chosen = says();
found.numbers = all(".token small").map(node => node.textContent);
type("a = 0 ; a ++; pass;"); found.newest = says();
press("Shakespeare"); await wait(() => all(".head").length === 12);
type("Æ b"); found.bytes = [tokens(), says()];
type("x".repeat(300)); found.long = [tokens().length, status(), byId("gates-next").firstChild.disabled];
const { Decoder } = await import("./forward.js"), get = name => fetch(name).then(answer => answer.arrayBuffer());
const { config } = JSON.parse(new TextDecoder().decode(await get("models.json"))).shakespeare;
found.logits = [...new Decoder(await get("shakespeare.safetensors"), config).read([256, 82, 79]).logits(2)];
const loaded = performance.getEntriesByType("resource").map(entry => entry.name);
found.outside = loaded.filter(name => !name.startsWith(location.origin));
"""


@needs_browser
@pytest.mark.parametrize("size", ["1200,900", "390,844"])
def test_the_page_works_in_a_browser(size, folder, address, library):
    markup = re.search(r"<link.*</script>", (PAGE / "index.md").read_text(), re.DOTALL)[0]
    page = folder / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{markup}</body>")
    shown = browse(page, folder, STEPS, f"--window-size={size}", address=address)
    assert (shown["errors"], shown["outside"], shown["wide"]) == ([], [], False)
    assert shown["answer"].startswith(
        "query 16 (a) predicts 3 with probability 1.00; layer 1, head 0"
    )
    assert shown["heads"] == 8
    words, status = shown["unfinished"]
    assert words == ["a", "=", "0", ";", "a", "++;"] and status.startswith("Not a token yet: pass.")
    assert shown["empty"] == ["none", "none", "Type, or choose an example."]
    assert shown["pressed"] == "a = 0 ; a ++; pass; print"
    assert shown["added"].startswith("a = 0 ; a ++; pass; print ")
    assert shown["pointed"].startswith("query 3 (;) predicts")
    assert shown["left"] != shown["pointed"] == shown["chosen"]
    assert shown["numbers"][4:] == [""] * (len(shown["numbers"]) - 4)
    assert shown["newest"].startswith("query 6 (pass;)")
    words, said = shown["bytes"]
    assert words == ["start", "Æ", "·", "␣", "b"] and said.startswith("query 4 (b) predicts ")
    logits_LV, _ = library("shakespeare")([256, 82, 79])
    np.testing.assert_allclose(shown["logits"], logits_LV[2], rtol=0, atol=1e-4)
    assert shown["long"] == [256, "Of 301 tokens, the page reads the first 256.", True]


@pytest.mark.parametrize("path", sorted(PAGE.glob("*.*")), ids=lambda path: path.name)
def test_the_page_names_no_other_host(path):
    assert not re.search(r"(?:https?:)?//\w[\w.-]*\.\w", path.read_text().replace("// ", ""))


def test_the_theme_asks_no_other_host():
    for name in ("griffe", "mkdocs"):
        pytest.importorskip(name)
    theme = Path(pytest.importorskip("material").__file__).parent / "templates" / "partials"
    link = (theme / "source.html").read_text()
    page = runpy.run_path(str(PAGE.parent / "generate.py"))["on_post_page"](link)
    assert 'data-md-component="source"' in link  # the theme asks for the numbers of this link
    assert "data-md-component" not in page and "href" in page


def test_the_page_is_small():
    files = [*HOOK["contents"]().values(), *(path.read_bytes() for path in PAGE.glob("*.*"))]
    assert sum(map(len, files)) < 3e6


def test_the_first_example_opens_on_the_head_that_selects_best(loaded):
    shown = HOOK["MODELS"]["counting"]
    trained = loaded("counting")
    tokens_L = trained.codec.encode(next(iter(shown["examples"].values())))
    seen = cj.inspect(trained.model(), trained.task.vocabulary, tokens_L)
    assert (seen.predicted, [seen.best.layer, seen.best.head]) == ("3", shown["best"])
