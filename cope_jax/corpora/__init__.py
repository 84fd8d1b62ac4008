"""Readers of public text corpora, plain or compressed, from a directory; a small sample is built in.

Each accepts `data_dir`, which has one folder per corpus, with its files under their published names. None is the
built-in sample: sentences written for this project, in the same formats, just enough to see every command work.
"""
