"""Trains many runs: cells, what is missing, engines that train it, and the search of rates."""
