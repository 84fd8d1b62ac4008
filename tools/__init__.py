"""What developers of this project use: `python -m tools.NAME`."""
