"""Tile programs: the hooks of an encoding on one tile of one head, as operations on arrays of rows
and columns.
"""
