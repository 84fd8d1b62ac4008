"""What Python takes for the package `experiments` when a command is started as a file; it says how to start it."""

import sys

if __name__ == "experiments":
    raise SystemExit(f"run it as: python -m experiments.{sys.argv[0].rpartition('/')[2].removesuffix('.py')}")
