"""Shows a page in headless Chromium, and runs a script in it."""

import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --virtual-time-budget=8000 --dump-dom"""

SCRIPT = """
<script>
const all = selector => [...document.querySelectorAll(selector)], found = {errors: []}, began = performance.now();
addEventListener("error", event => found.errors.push(event.message));
addEventListener("securitypolicyviolation", event => found.errors.push(event.blockedURI));
console.error = (...parts) => found.errors.push(parts.join(" "));
addEventListener("load", () => { found.milliseconds = performance.now() - began; setTimeout(async () => {
  try {
    %s
  } catch (error) { found.errors.push(String(error)); }
  found.wide = document.documentElement.scrollWidth > innerWidth;
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.loaded = performance.getEntriesByType("resource").length;
  const node = document.createElement("pre");
  node.id = "found"; node.textContent = JSON.stringify(found); document.body.append(node);
}, 700); });
</script>
"""


def browse(path, folder, script, *flags, address=None):
    """The object `found` that a script fills, and the errors of the page and its script.

    A page that loads files needs the `address` of a server of the folder.
    """
    copy = folder / "probed.html"
    # Libraries may have it too.
    copy.write_text(path.read_text().replace("<body>", "<body>" + SCRIPT % script, 1))
    command = [
        CHROMIUM,
        *OPTIONS.split(),
        *flags,
        f"--user-data-dir={folder / 'user'}",
        f"{address}/{copy.name}" if address else copy.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    text = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)[1]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
