"""Readers of public text corpora, plain or compressed, from a directory; a small sample is built in.

Each takes `data_dir`, which holds one folder for each corpus with its files under their published names. None is the
built-in sample: original sentences in the same files, enough to see every command work and no more.
"""
