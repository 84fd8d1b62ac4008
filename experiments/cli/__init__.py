"""Code shared by all commands: flags for distributed runs, and one-line errors."""
