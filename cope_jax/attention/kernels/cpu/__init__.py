"""Tile programs as C++ for CPUs, compiled at first use."""
