"""Triton for NVIDIA GPUs, for encodings whose `native_score` says what they add."""
