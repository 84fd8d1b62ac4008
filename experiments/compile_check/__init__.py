"""Compiles training steps for accelerators that are not present, and reads figures from the compiled programs."""
