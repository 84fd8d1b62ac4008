"""Random wrong input for commands: flags, fields of configs, damaged files, and servers that
misbehave.
"""

import dataclasses
import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cope_jax.cli.config_flags import leaves
from cope_jax.training import config_files
from tests.commands.commands import Surroundings
from tools.fuzz.servers import ANSWERS
from tools.fuzz.values import JSON, JUNK, NEVER, THINGS, VARIABLES

ENCODINGS = "cope(npos_max={}) cope(gate={}) rope(base={}) t5(num_buckets={}) cope+{} {}+rope"
COMMANDS = """
train: --config={config} --config.training.steps=4 --workdir={out}
train of shards: --config=lm:125m "--config.task.options.folders=('{shards}',)" SMALL
  --config.task.options.tokenizer=bytes --workdir={out}
compare: --config={config} --config.training.steps=4 --encodings=rope --seeds=1 --jobs=1
  --workdir={out}
evaluate: --model={run} --examples=4
inspect: --model={run} --split=dense --example=1 --out={out}
generate: --model={text} --prompt=The --max_new_tokens=3 --temperature=0.5 --top_k=3 --top_p=0.9
generate to a file: --model={text} --prompt=The --max_new_tokens=3 --out={out}
perplexity: --model={text} --length=8 --stride=4 --split=test
convert: --model={text} --format=cope_jax --out={out}
export: --task=counting --options=max_operations=8 --sizes=train=4 --out={out}
export of shards: --corpus=tinyshakespeare --tokenizer=bytes --length=16 --packing=stream
  --shard=0/1 --shard_tokens=9999 --workers=1 --out={out}
sweep: --grid=abilities --dry_run --workdir={out}
download: --corpora=tinyshakespeare --mirror={mirror}/whole --out={out}
list: --only=tasks
floors: --model={text}
language_models: --models={text} --workdir={out}
neighbours: --models={text} --word=play "--sentences=They play|A play" --workdir={out}
probe: --models={run} --workdir={out}
classify: --systems=majority --repeats=1 --workdir={out}
scaling: --figures={folder}
"""
"""Right flags of each command."""
SMALL = """
task.options.length=16 model.num_layers=1 model.block.model_dim=8 model.block.num_heads=2
training.steps=2 training.batch_size=4 training.steps_per_dispatch=2 training.evaluate_every=2
training.checkpoint_every=2 optimizer.warmup_steps=1 evaluation.examples=4
evaluation.curve_examples=4 evaluation.batch_size=4 job.mesh.data=1
"""
"""Fields of the config of `train of shards`, which make it tiny."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a command.

    Attributes:
      kind: a key of `KINDS`.
      command: the name of the command.
      flags: its flags.
      text: what is wrong.
      absurd: whether the command must refuse it.
      around: the surroundings of the command.
    """

    kind: str
    command: str
    flags: tuple[str, ...]
    text: str
    absurd: bool = False
    around: Surroundings = Surroundings()


class Material:
    """A config and finished runs in `folder`; `mirror` is the URL of a server of downloads."""

    def __init__(self, folder: Path, mirror: str):
        self.folder, self.mirror = folder, mirror
        self.config, self.run, self.text = folder / "tiny.py", folder / "run", folder / "text"
        self.model, self.shards = folder / "model", folder / "shards"

    def base(self, out: Path) -> dict[str, list[str]]:
        """Right flags of each command, which write to `out`."""
        small = " ".join(f"--config.{field}" for field in SMALL.split())
        lines = (line.split(": ", 1) for line in re.split(r"\n(?=\w)", COMMANDS.strip()))
        return {
            name: [
                word.format(out=out, **vars(self))
                for word in shlex.split(flags.replace("SMALL", small))
            ]
            for name, flags in lines
        }

    def draw(self, rng: random.Random, out: Path) -> tuple[str, list[str]]:
        """A random command, and its right flags."""
        return rng.choice(list(self.base(out / "out").items()))


def draw(seed: int, number: int, material: Material, out: Path) -> Case:
    """The case of a number. It damages a copy of a file in `out`, which is a new folder."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(tuple(KINDS), [WEIGHTS.get(kind, 3) for kind in KINDS])[0]
    return KINDS[kind](rng, material, out)


def _flags(rng: random.Random, material: Material, out: Path) -> Case:
    """A flag that is missing, misspelt or given twice, or whose value is odd; the value may be at
    the end of a path that is right.
    """
    name, flags = material.draw(rng, out)
    index = rng.choice([index for index, word in enumerate(flags) if word != "--dry_run"])
    flag, _, old = flags[index].partition("=")
    change, absurd = rng.choice(["value"] * 8 + ["gone", "twice", "name", "unknown", "word"]), False
    if change == "value":
        value = "".join(rng.choices(rng.choice((JUNK, JUNK, JUNK, NEVER)), k=rng.choice((1, 1, 2))))
        if flag == "--encodings" or rng.random() < 0.1:
            value = rng.choice(ENCODINGS.split()).replace("{}", value)
        elif str(out) in old and rng.random() < 0.5:
            value = f"{out}/{value}"
        elif str(material.folder) in old and rng.random() < 0.2:
            value = f"{old}/{value}"
        flags[index] = f"{flag}={value}"
        absurd = value in NEVER and old.replace(".", "").isdecimal()
    elif change == "gone":
        del flags[index]
    elif change == "twice":
        flags.append(f"{flag}={rng.choice(JUNK)}")
    elif change == "name":
        letter = rng.randrange(2, len(flag))
        flags[index] = f"{flag[:letter]}{flag[letter + 1 :]}={old}"
    else:
        flags.insert(index, rng.choice(("--x=1", "--no", "--") if change == "unknown" else JUNK))
    return Case("flags", name, tuple(flags), f"{change} of {flag}", absurd)


def _fields(rng: random.Random, material: Material, out: Path) -> Case:
    """Odd values of one or two fields of a config."""
    text = rng.random() < 0.3
    flags = material.base(out / "out")["train of shards" if text else "train"]
    fields = [*leaves("--config", config_files.named("lm:125m" if text else str(material.config)))]
    chosen, absurd = [], False
    for name, default in rng.sample(fields, rng.choice((1, 1, 2))):
        value = rng.choice(rng.choice((JUNK, JUNK, JUNK, NEVER)))
        number = type(default) in (int, float)
        if number and rng.random() < 0.5:
            near = (-default, default + 1, default * 1000, default / 3, -1, 0, 1, 2, 3, 7, 1e-9)
            value = str(rng.choice(near))
        # An encoding that is not used has no size.
        may_be_large = "seed" in name or ".encodings." in name
        absurd |= number and value in (NEVER[:4] if may_be_large else NEVER)
        chosen.append(f"{name}={value}")
    return Case("fields", "train", (*flags, *chosen), " ".join(chosen)[:200], absurd)


def _files(rng: random.Random, material: Material, out: Path) -> Case:
    """A damaged copy of a file, and a command that reads it."""
    original, readers = rng.choice(
        (
            (material.run, ("evaluate", "inspect", "train", "compare")),
            (material.text, ("generate", "perplexity", "convert")),
            (material.model, ("generate", "convert")),
            (material.shards, ("train of shards", "export of shards")),
            (material.config, ("train",)),
        )
    )
    copy, name = out / original.name, rng.choice(readers)
    (shutil.copytree if original.is_dir() else shutil.copy)(original, copy)
    files = sorted(path for path in (copy, *copy.rglob("*")) if path.is_file())
    small = [path for path in files if "checkpoints" not in path.parts]
    path = rng.choice(small if small and rng.random() < 0.8 else files)
    how = rng.choice(tuple(DAMAGES))
    DAMAGES[how](rng, path)
    read = material.text if original is material.model else original
    flags = [word.replace(str(read), str(copy)) for word in material.base(out / "out")[name]]
    if name in ("train", "compare", "export of shards") and original is not material.config:
        flags = [word.replace(str(out / "out"), str(copy)) for word in flags]
    return Case("files", name, tuple(flags), f"{path.relative_to(out)}: {how}")


def _json(rng: random.Random, path: Path) -> None:
    """Replaces a random value of a JSON file, or of a line of JSON."""
    lines = path.read_bytes().split(b"\n") if path.suffix == ".jsonl" else [path.read_bytes()]
    number = rng.randrange(len(lines))
    try:
        lines[number] = json.dumps(_changed(rng, json.loads(lines[number]))).encode()
    except ValueError:
        lines[number] = b"{}"
    path.write_bytes(b"\n".join(lines))


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(tuple(value))
        if rng.random() < 0.15:
            return {key: other for key, other in value.items() if key != name}
        return {**value, name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(min(len(value), 50))
        return [*value[:index], _changed(rng, value[index]), *value[index + 1 :]]
    return rng.choice(JSON)


def _flip(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 50)) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _thing(name: str) -> Callable[[random.Random, Path], None]:
    def damage(rng: random.Random, path: Path) -> None:
        path.unlink()
        THINGS[name](path, path)

    return damage


DAMAGES: dict[str, Callable[[random.Random, Path], object]] = {
    "another value": _json,
    "a value of another type": _json,
    "cut": lambda rng, path: os.truncate(path, int(path.stat().st_size * rng.random())),
    "flipped bits": _flip,
    "longer": lambda rng, path: path.write_bytes(path.read_bytes() + rng.randbytes(50)),
    "other bytes": lambda rng, path: path.write_bytes(rng.randbytes(300)),
    "deep": lambda rng, path: path.write_text("[" * 100_000),
    "null": lambda rng, path: path.write_text("null\n"),
    **{name: _thing(name) for name in ("nothing", "a folder", "a link to itself", "a pipe")},
    "empty": _thing("an empty file"),
}


def _servers(rng: random.Random, material: Material, out: Path) -> Case:
    """A download or a run from a server that misbehaves."""
    commands = material.base(out / "out")
    if rng.random() < 0.5:
        fault = rng.choice(tuple(ANSWERS))
        flags = [word.replace("/whole", f"/{fault}") for word in commands["download"]]
        return Case("servers", "download", tuple(flags), fault, absurd=True)
    fault = rng.choice(("503", "429", "401", "403", "412", "torn", "none"))
    flags = [*commands["train"][:-1], f"--workdir=gs://bucket-{fault}/{rng.random()}"]
    return Case("servers", "train", tuple(flags), f"bucket: {fault}", absurd=fault != "none")


def _paths(rng: random.Random, material: Material, out: Path) -> Case:
    """Something else where a file or folder should be."""
    name, flags = material.draw(rng, out)
    paths = [index for index, word in enumerate(flags) if "/" in word and "://" not in word]
    if not paths:
        return _paths(rng, material, out)
    index = rng.choice(paths)
    flag, _, old = flags[index].partition("=")
    how = rng.choice(tuple(THINGS))
    names = ("thing", "th[i]ng", "th*ng?", "th\\ng", "thing ", "th\udcffng", "th\nng")
    path = out / rng.choice(names)
    known = {str(path): path for path in (material.run, material.text, material.config)}
    right = known.get(old, material.run)
    THINGS[how](path, right)
    below = "/out" if how == "a folder" and right is material.run and str(out) in old else ""
    flags[index] = f"{flag}={path}{below}"
    return Case("paths", name, tuple(flags), f"{flag}: {how} named {path.name!r}")


def _around(rng: random.Random, material: Material, out: Path) -> Case:
    """Right flags, sometimes with a mistake, in odd surroundings."""
    names = ("list", "evaluate", "inspect", "generate", "generate to a file", "convert", "sweep")
    name, variable = rng.choice(("list", *names)), rng.choice(tuple(VARIABLES))
    flags = [*material.base(out / "out")[name], *rng.choice(([], [], ["--help"], ["--no_such=ü"]))]
    around = Surroundings(
        gone=rng.random() < 0.1,
        encoding=rng.choice(("utf-8", "ascii", "latin-1", "euc_jp", "cp1252", "utf-16")),
        variables={variable: rng.choice(VARIABLES[variable])},
        streams={n: rng.choice(("", "/dev/full")) for n in (0, 1, 2) if rng.random() < 0.3},
    )
    return Case("around", name, tuple(flags), f"{around}", around=around)


KINDS: dict[str, Callable[[random.Random, Material, Path], Case]] = {
    "flags": _flags,
    "fields": _fields,
    "files": _files,
    "servers": _servers,
    "paths": _paths,
    "around": _around,
}
WEIGHTS = {"flags": 6, "fields": 4, "servers": 1}
