"""Prints how to run a command as a module. If a command is run as a file, Python imports this file, not the package."""

import sys

if __name__ == "experiments":
    raise SystemExit(
        f"this file is not a script: run python -m experiments.{sys.argv[0].rpartition('/')[2].removesuffix('.py')}"
    )
