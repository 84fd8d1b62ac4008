"""Training: a pure step function, seeds side by side, checkpoints that resume exactly."""
