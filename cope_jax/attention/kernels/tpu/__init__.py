"""Pallas kernels for TPUs, which run tile programs of the encoding's own hooks."""
