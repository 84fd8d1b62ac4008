"""The commands: `cope-jax NAME` imports the module NAME of this package and calls its `main`."""
