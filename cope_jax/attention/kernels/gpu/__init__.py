"""Generated Triton for NVIDIA GPUs."""
