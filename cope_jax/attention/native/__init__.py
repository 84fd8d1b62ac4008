"""Kernels written by hand: C++ for CPUs in `cpu_attention`, Triton for NVIDIA GPUs in `gpu_attention`."""
