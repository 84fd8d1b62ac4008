"""The commit of the code that runs; imports no JAX, so a process can read it before all else."""

import shutil
import subprocess
from pathlib import Path

import cope_jax


def commit() -> str | None:
    """The commit of the checkout, with -dirty after it if files differ; None outside of one."""
    root, git = Path(cope_jax.__file__).parents[1], shutil.which("git")
    # An installed package may be inside a checkout of something else.
    if git is None or not (root / ".git").exists():
        return None

    def output(*command: str) -> str:
        whole = [git, "-C", str(root), *command]
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout

    try:
        changed = output("status", "--porcelain", "--untracked-files=no")
        return output("rev-parse", "HEAD").strip() + ("-dirty" if changed else "")
    except subprocess.CalledProcessError:  # no commit yet
        return None
