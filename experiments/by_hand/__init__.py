"""Weights written by hand, which show what an encoding can do apart from what it learns."""
