"""Numerical operations that several layers of the package share."""
