"""Trains many runs: cells, the plan of what is missing, engines that train it, and the search of learning rates."""
