"""Code of all commands: reading flags, one-line errors, output files, several processes."""
