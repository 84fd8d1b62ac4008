"""Random wrong input for commands: flags, fields of configs, damaged files, and servers that
misbehave.
"""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cope_jax.training import config_files
from tests.commands.commands import Surroundings
from tools.fuzz.odd import ODD, THINGS, VARIABLES
from tools.fuzz.servers import ANSWERS

JUNK = (
    "",
    " ",
    "x",
    "0",
    "-1",
    "1",
    "3",
    "2.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e30",
    "2147483648",
    "9" * 30,
    "None",
)
JUNK += (
    "True",
    "[]",
    "()",
    "(1,",
    "{'a': 1}",
    "'",
    "a,b",
    "a=b",
    "../..",
    "/dev/null",
    "ü☃",
    "\x01\x1b[31m",
    "a\nb",
)
JUNK += (
    "%s%n",
    "x" * 3000,
    "-" * 9,
    "cope",
    "quick",
    "rope+",
    "gs://",
    "gs://bucket-503/x",
    "http://x/y",
    "~/x",
)
ENCODINGS = (
    "cope(npos_max={})",
    "cope(gate={})",
    "rope(base={})",
    "t5(num_buckets={})",
    "cope+{}",
    "{}+rope",
    "rope({}=1)",
)
NEVER = ("nan", "inf", "-inf", "1e400", "2147483648", "9" * 30)
"""Values that no number of a config or flag can have; most can neither be so large as the last two.

"""

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2.5,
    1e300,
    10**30,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"x": 1},
    "x" * 5000,
)


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
        config = [f"--config={self.config}", "--config.training.steps=4"]
        workdir = f"--workdir={out}"
        shards = [
            "--config=lm:125m",
            f"--config.task.options.folders=('{self.shards}',)",
            *SMALL_TEXT,
        ]
        text = f"--model={self.text}"
        return {
            "train": [*config, workdir],
            "train of shards": [*shards, "--config.task.options.tokenizer=bytes", workdir],
            "compare": [*config, "--encodings=rope", "--seeds=1", "--jobs=1", workdir],
            "evaluate": [f"--model={self.run}", "--examples=4"],
            "inspect": [f"--model={self.run}", "--split=dense", "--example=1", f"--out={out}"],
            "generate": [
                text,
                "--prompt=The",
                "--max_new_tokens=3",
                "--temperature=0.5",
                "--top_k=3",
                "--top_p=0.9",
            ],
            "perplexity": [text, "--length=8", "--stride=4", "--split=test"],
            "convert": [text, "--format=cope_jax", f"--out={out}"],
            "export": [
                "--task=counting",
                "--options=max_operations=8",
                "--sizes=train=4",
                f"--out={out}",
            ],
            "export of shards": [
                *(
                    "--corpus=tinyshakespeare",
                    "--tokenizer=bytes",
                    "--length=16",
                    "--packing=stream",
                ),
                *("--shard=0/1", "--shard_tokens=9999", "--workers=1", f"--out={out}"),
            ],
            "sweep": ["--grid=abilities", "--dry_run", workdir],
            "download": [
                "--corpora=tinyshakespeare",
                f"--mirror={self.mirror}/whole",
                f"--out={out}",
            ],
            "list": ["--only=tasks"],
            "generate to a file": [text, "--prompt=The", "--max_new_tokens=3", f"--out={out}"],
            "floors": [text],
            "language_models": [f"--models={self.text}", workdir],
            "neighbours": [
                f"--models={self.text}",
                "--word=play",
                "--sentences=They play|A play",
                workdir,
            ],
            "probe": [f"--models={self.run}", workdir],
            "classify": ["--systems=majority", "--repeats=1", workdir],
            "scaling": [f"--figures={self.folder}"],
        }


SMALL_TEXT = (
    *(
        "--config.task.options.length=16",
        "--config.model.num_layers=1",
        "--config.model.block.model_dim=8",
    ),
    *(
        "--config.model.block.num_heads=2",
        "--config.training.steps=2",
        "--config.training.batch_size=4",
    ),
    *("--config.training.steps_per_dispatch=2", "--config.training.evaluate_every=2"),
    *(
        "--config.training.checkpoint_every=2",
        "--config.optimizer.warmup_steps=1",
        "--config.evaluation.examples=4",
    ),
    *(
        "--config.evaluation.curve_examples=4",
        "--config.evaluation.batch_size=4",
        "--config.job.mesh.data=1",
    ),
)


def draw(seed: int, number: int, material: Material, out: Path, kinds: Sequence[str]) -> Case:
    """The case of a number. It damages a copy of a file in `out`, which is a new folder."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(kinds, [WEIGHTS.get(kind, 3) for kind in kinds])[0]
    return KINDS[kind](rng, material, out)


def _flags(rng: random.Random, material: Material, out: Path) -> Case:
    commands = material.base(out / "out")
    name = rng.choice(tuple(commands))
    flags, absurd = list(commands[name]), False
    index = rng.randrange(len(flags))
    index -= flags[index] == "--dry_run"  # without it a sweep trains for hours
    flag, _, old = flags[index].partition("=")
    change = rng.choice(
        ("value", "value", "value", "value", "gone", "twice", "name", "unknown", "word")
    )
    if change == "value":
        value = rng.choice(JUNK)
        if flag == "--encodings" or rng.random() < 0.1:
            value = rng.choice(ENCODINGS).format(value)
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
        flags.insert(
            index, rng.choice(("--x=1", "--no", "--")) if change == "unknown" else rng.choice(JUNK)
        )
    return Case("flags", name, tuple(flags), f"{change} of {flag}", absurd)


def _fields(rng: random.Random, material: Material, out: Path) -> Case:
    text = rng.random() < 0.3
    flags = material.base(out / "out")["train of shards" if text else "train"]
    fields = [*_leaves("--config", config_files.named("lm:125m" if text else str(material.config)))]
    chosen, absurd = [], False
    for name, default in rng.sample(fields, rng.choice((1, 1, 2))):
        value = rng.choice(JUNK)
        if isinstance(default, int | float) and rng.random() < 0.5:
            value = str(
                rng.choice(
                    (-default, default + 1, default * 1000, default / 3, -1, 0, 1, 2, 3, 7, 1e-9)
                )
            )
        number = isinstance(default, int | float) and not isinstance(default, bool)
        # An encoding that is not used has no size.
        may_be_large = "seed" in name or ".encodings." in name
        absurd |= number and (value in NEVER[:4] or (value in NEVER and not may_be_large))
        chosen.append(f"{name}={value}")
    return Case("fields", "train", (*flags, *chosen), " ".join(chosen)[:200], absurd)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, config_files.ConfigDict):
        yield name, value
        return
    for field in value:
        yield from _leaves(f"{name}.{field}", value[field])


def _files(rng: random.Random, material: Material, out: Path) -> Case:
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
    files = sorted(path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
    small = [path for path in files if "checkpoints" not in path.parts]
    path = rng.choice(small if small and rng.random() < 0.8 else files)
    how = rng.choice(tuple(DAMAGES))
    DAMAGES[how](rng, path)
    flags = [word.replace(str(original), str(copy)) for word in material.base(out / "out")[name]]
    if original is material.model:
        flags = [word.replace(str(material.text), str(copy)) for word in flags]
    if name in ("train", "compare", "export of shards") and original is not material.config:
        flags = [word.replace(str(out / "out"), str(copy)) for word in flags]
    return Case("files", name, tuple(flags), f"{path.relative_to(out)}: {how}")


def _json(rng: random.Random, path: Path) -> None:
    """Replaces a random value of a JSON file, or of a line of JSON."""
    lines = path.read_bytes().split(b"\n") if path.suffix == ".jsonl" else [path.read_bytes()]
    number = rng.randrange(len(lines))
    try:
        content = json.loads(lines[number])
    except ValueError:
        path.write_text("{}")
        return
    lines[number] = json.dumps(_changed(rng, content)).encode()
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
    return rng.choice(VALUES)


def _flip(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 50)) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _replace(make: Callable[[Path], object]) -> Callable[[random.Random, Path], None]:
    def damage(rng: random.Random, path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[random.Random, Path], None]] = {
    "another value": _json,
    "a value of another type": _json,
    "cut": lambda rng, path: os.truncate(path, int(path.stat().st_size * rng.random())),
    "flipped bits": _flip,
    "empty": lambda rng, path: os.truncate(path, 0),
    "longer": lambda rng, path: path.write_bytes(path.read_bytes() + rng.randbytes(50)),
    "other bytes": lambda rng, path: path.write_bytes(rng.randbytes(300)),
    "no file": lambda rng, path: path.unlink(),
    "a folder": _replace(Path.mkdir),
    "a link to itself": _replace(lambda path: path.symlink_to(path)),
    "a pipe": _replace(os.mkfifo),
    "deep": lambda rng, path: path.write_text("[" * 100_000),
    "null": lambda rng, path: path.write_text("null\n"),
}


def _servers(rng: random.Random, material: Material, out: Path) -> Case:
    if rng.random() < 0.5:
        fault = rng.choice(tuple(ANSWERS))
        flags = (
            "--corpora=" + rng.choice(("tinyshakespeare", "wikitext-2")),
            f"--mirror={material.mirror}/{fault}",
            f"--out={out / 'out'}",
        )
        return Case("servers", "download", flags, fault, absurd=True)
    fault = rng.choice(("503", "429", "401", "403", "412", "torn", "none"))
    flags = (*material.base(out)["train"][:-1], f"--workdir=gs://bucket-{fault}/{rng.random()}")
    return Case("servers", "train", flags, f"bucket: {fault}", absurd=fault != "none")


def _words(rng: random.Random, material: Material, out: Path) -> Case:
    """A value that is odd, or is at the end of a path that may be right."""
    commands = material.base(out / "out")
    name = rng.choice(tuple(commands))
    flags = list(commands[name])
    index = rng.choice([index for index, word in enumerate(flags) if word != "--dry_run"])
    flag, _, old = flags[index].partition("=")
    value = "".join(rng.choices(ODD, k=rng.choice((1, 1, 2))))
    folder = (
        f"{out}/"
        if str(out) in old
        else f"{old}/"
        if str(material.folder) in old and rng.random() < 0.3
        else ""
    )
    flags[index] = f"{flag}={folder}{value}"
    return Case("words", name, tuple(flags), flags[index][:200])


def _paths(rng: random.Random, material: Material, out: Path) -> Case:
    """Something else where a file or folder should be."""
    commands = material.base(out / "out")
    name = rng.choice(
        [name for name, flags in commands.items() if any("/" in flag for flag in flags)]
    )
    flags = list(commands[name])
    index = rng.choice(
        [index for index, word in enumerate(flags) if "/" in word and "://" not in word]
    )
    flag, _, old = flags[index].partition("=")
    how = rng.choice(tuple(THINGS))
    path = out / rng.choice(
        ("thing", "th[i]ng", "th*ng?", "th\\ng", "thing ", "th\udcffng", "th\nng")
    )
    right = next(
        (path for path in (material.run, material.text, material.config) if str(path) == old),
        material.run,
    )
    THINGS[how](path, right)
    flags[index] = (
        f"{flag}={path}{'/out' if how == 'a folder' and right is material.run and str(out) in old else ''}"
    )
    return Case("paths", name, tuple(flags), f"{flag}: {how} named {path.name!r}")


def _around(rng: random.Random, material: Material, out: Path) -> Case:
    """Right flags, sometimes with a mistake, in odd surroundings."""
    commands = material.base(out / "out")
    name = rng.choice(
        (
            "list",
            "list",
            "evaluate",
            "inspect",
            "generate",
            "generate to a file",
            "convert",
            "sweep",
        )
    )
    flags = [*commands[name], *rng.choice(([], [], ["--help"], ["--no_such=ü"]))]
    streams = {number: rng.choice(("", "/dev/full")) for number in (0, 1, 2) if rng.random() < 0.3}
    variable = rng.choice(tuple(VARIABLES))
    around = Surroundings(
        gone=rng.random() < 0.1,
        encoding=rng.choice(("utf-8", "ascii", "latin-1", "euc_jp", "cp1252", "utf-16")),
        variables={variable: rng.choice(VARIABLES[variable])},
        streams=streams,
    )
    return Case("around", name, tuple(flags), f"{around}", around=around)


KINDS = {
    "flags": _flags,
    "fields": _fields,
    "files": _files,
    "servers": _servers,
    "words": _words,
    "paths": _paths,
    "around": _around,
}
WEIGHTS = {"fields": 4, "servers": 1}
