"""Prints how to start a command that was started as a file: Python then imports this instead of the package."""

import sys

if __name__ == "experiments":
    raise SystemExit(f"run it as: python -m experiments.{sys.argv[0].rpartition('/')[2].removesuffix('.py')}")
