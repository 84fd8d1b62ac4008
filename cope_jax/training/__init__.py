"""Training: one pure step, seeds side by side, checkpoints that go on exactly."""
