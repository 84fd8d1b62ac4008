"""What the gates of a model count."""
