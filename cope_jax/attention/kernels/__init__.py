"""Kernels that run attention with an encoding's own hooks, one file for each backend."""
