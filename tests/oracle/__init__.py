"""What the package should compute, written anew from the papers: NumPy float64 and explicit loops, no JAX."""
