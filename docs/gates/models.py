"""Hook of mkdocs: writes what the page of docs/gates/ loads, the trained models and the viewer."""

import json
from pathlib import Path
from typing import Any

from cope_jax import tasks

PACKAGE = Path(__file__).parents[2] / "cope_jax"
MODELS: dict[str, dict[str, Any]] = {
    "counting": {
        "title": "Counting in programs",
        "note": "The model was trained to predict only the number after “print a”.",
        "best": [1, 0],  # the head that selects best
        "mark": " (counts ++;)",
        "keys": ["a = 0 ;", "pass;", "a ++;", "print a"],
        "examples": {
            "three increments": "a = 0 ; pass; pass; a ++; pass; a ++; pass; pass; a ++; print a",
            "set to 0 again": "a = 0 ; a ++; a ++; pass; a = 0 ; pass; a ++; print a",
            "seven in a row": "a = 0 ; a ++; a ++; a ++; a ++; a ++; a ++; a ++; print a",
            "two, far apart": "a = 0 ; a ++; " + "pass; " * 40 + "a ++; print a",
        },
    },
    "shakespeare": {
        "title": "Shakespeare's plays in bytes",
        "note": "A token is a byte, and ⏎ ends a line.",
        "best": [1, 1],
        "mark": " (counts ends of words)",
        "keys": [],
        "examples": {
            "Romeo": "ROMEO:\nWhat light through yonder window",
            "Hamlet": "To be, or not to be, that is the question",
            "two speakers": "First Citizen:\nHear me.\n\nAll:\nWe hear, we hear.\n\nFirst ",
        },
    },
}


def contents() -> dict[str, bytes]:
    """The files that the page loads, by name."""
    files, models = {}, {}
    for name, shown in MODELS.items():
        folder = PACKAGE / "trained" / name
        files[f"{name}.safetensors"] = (folder / "model.safetensors").read_bytes()
        config = json.loads((folder / "config.json").read_text())
        models[name] = shown | {"config": config, "bytes": len(files[f"{name}.safetensors"])}
        task = json.loads((folder / "run.json").read_text())["config"]["task"]
        if (folder / "tokenizer.json").exists():  # the tokens are bytes, after one that begins
            models[name] |= {"vocabulary": None, "begin": [config["model"]["vocab_size"] - 1]}
        else:
            words = tasks.create(task["name"], **task["options"]).vocabulary
            models[name] |= {"vocabulary": list(words), "begin": []}
    files["models.json"] = json.dumps(models).encode()
    for kind in ("css", "js"):
        files[f"viewer.{kind}"] = (PACKAGE / "evaluation" / "gates" / f"viewer.{kind}").read_bytes()
    return files


def on_files(files: Any, config: Any) -> Any:
    """Adds the files to the page's folder."""
    from mkdocs.structure.files import File  # the test of the page needs no mkdocs

    for name, content in contents().items():
        files.append(File.generated(config, f"gates/{name}", content=content))
    return files
