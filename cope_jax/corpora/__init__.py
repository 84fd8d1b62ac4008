"""Reads public text corpora, plain or compressed, from a directory. A small sample is built in.

Every reader accepts `data_dir`, a directory with one folder per corpus. The files have their
published names. If `data_dir` is None, a reader reads the built-in sample: sentences written for
this project, in the same formats. The sample is just large enough to show that every command works.
"""
