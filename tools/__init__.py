"""Tools of developers of this project: `python -m tools.NAME`."""
