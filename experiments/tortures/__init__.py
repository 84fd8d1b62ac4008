"""The parts of `experiments.torture`: a small run, how it is struck, and whether it ends as one left in peace."""
