"""What was measured as tables."""
