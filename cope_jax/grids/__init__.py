"""Grids, one file for each, whose cells `cope-jax sweep` trains."""
