"""Stand-ins for the programs that the launch scripts call, and a look at what they were asked."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "experiments" / "launch"

VARIABLES = {
    "PROJECT": "lab",
    "ZONE": "us-west4-a",
    "NAME": "cope",
    "ACCELERATOR_TYPE": "v5litepod-16",
    "REPOSITORY": "https://example.org/cope-jax",
    "CONFIG": "quick",
    "WORKDIR": "/shared/runs/quick",
    "POLL_SECONDS": "0",
}

# Stands for a program: notes its words and answers with the status and the output of the first
# answer whose pattern they match; each answer is given once, but for the last one of its pattern.
STAND_IN = """#!{python} -SE
import json, re, sys
from pathlib import Path
folder = Path({folder!r})
words = [Path(sys.argv[0]).name, *sys.argv[1:]]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps([words, "" if sys.stdin.isatty() else sys.stdin.read()]) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
for pattern, queue in answers.items():
    if re.search(pattern, " ".join(words)):
        status, text = queue.pop(0) if len(queue) > 1 else queue[0]
        (folder / "answers.json").write_text(json.dumps(answers))
        print(text)
        sys.exit(status)
"""


class Stage:
    """A PATH whose gcloud, srun and scontrol only note how they were called."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("gcloud", "srun", "scontrol"):
            path = folder / "bin" / name
            path.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            path.chmod(0o755)
        self.answer({})

    def answer(self, answers):
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def run(self, command, cwd=ROOT, **changed):
        name, *words = shlex.split(command) if isinstance(command, str) else command
        variables = environment() | VARIABLES | changed
        variables["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {name: value for name, value in variables.items() if value is not None}
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run([LAUNCH / name, *words], cwd=cwd, env=variables, **options)

    @property
    def calls(self):
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)[0] for line in lines]


def environment():
    return {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and "SLURM" not in name
    }


def remote(call):
    """The words of a command that was to run on the hosts of a TPU."""
    line = next(word for word in call if word.startswith("--command=")).removeprefix("--command=")
    return shlex.split(line)


def verbs(calls):
    """The requests to a TPU, in one word each."""
    matches = (re.search(r"cope_jax train|worker_setup", " ".join(call)) for call in calls)
    return [match[0] if match else call[4] for match, call in zip(matches, calls, strict=True)]


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)
