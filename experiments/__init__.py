"""The commands: the only place with flags."""
