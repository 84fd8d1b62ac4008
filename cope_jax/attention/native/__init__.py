"""Attention in C++ for CPUs: see `native_attention`."""
