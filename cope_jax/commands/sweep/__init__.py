"""Trains the cells of a grid: `cope-jax sweep`."""
