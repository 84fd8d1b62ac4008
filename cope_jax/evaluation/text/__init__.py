"""How probable a model finds a text."""
