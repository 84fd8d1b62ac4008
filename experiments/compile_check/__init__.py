"""Training steps compiled for accelerators that are not there, and what the compiled programs tell."""
