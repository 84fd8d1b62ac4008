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


def run(folder, script, **given):
    """What a script of ES modules writes to `result`."""
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
  for (const layer of numbers(decoder.layers.length)) for (const head of numbers(decoder.heads))
    for (const query of numbers(tokens.length)) for (const [name, row] of Object.entries(decoder.maps(layer, head, query)))
      maps[name].push(...row, ...Array(tokens.length - row.length).fill(0));
  return { tokens, labels, logits, maps };
});
"""


@needs_node
@pytest.mark.parametrize("name", MODELS)
def test_the_page_computes_the_logits_and_maps_of_the_library(name, folder, loaded):
    trained = loaded(name)
    graph, state = nnx.split(trained.model())

    @jax.jit  # compiled once: what is padded at the end changes nothing before it
    def expected(tokens_BL):
        with jax.default_matmul_precision("highest"):
            model = nnx.merge(graph, state)
            return model(tokens_BL), model.maps(tokens_BL)

    shown = run(folder, SCRIPT, name=name, texts=TEXTS[name])["texts"]
    for text, seen in zip(TEXTS[name], shown, strict=True):
        tokens = [*trained.codec.begin, *trained.codec.encode(text).tolist()]
        assert seen["tokens"] == tokens
        count = len(tokens)
        assert len(seen["labels"]) == count
        logits_BLV, maps = expected(np.pad(np.array([tokens], np.int32), ((0, 0), (0, 256 - count))))
        np.testing.assert_allclose(seen["logits"], logits_BLV[0, :count], rtol=0, atol=1e-4)
        assert set(seen["maps"]) == set(maps)
        for kind, map_NBHLL in maps.items():
            map_NHLL = np.tril(np.asarray(map_NBHLL)[:, 0, :, :count, :count])
            actual = np.reshape(seen["maps"][kind], map_NHLL.shape)
            np.testing.assert_allclose(actual, map_NHLL, rtol=0, atol=1e-4, err_msg=kind)
