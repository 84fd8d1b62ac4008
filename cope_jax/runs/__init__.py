"""A run's folder: open and lock it, load it, start from another model, train a grid of runs."""
