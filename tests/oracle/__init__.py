"""Results of the package, written again from the papers: NumPy float64, explicit loops, no JAX."""
