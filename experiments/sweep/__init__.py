"""Trains the cells of a grid: `python -m experiments.sweep`."""
