"""Code that commands share: reading flags, one-line errors, output files, and runs of several
processes.
"""
