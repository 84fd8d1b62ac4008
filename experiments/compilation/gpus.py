"""What XLA must know of a GPU to compile for it without having one."""

# The figures of compute capability 9.0 in NVIDIA's CUDA programming guide, and of the boards in their data sheets.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_BOARDS = {
    "h100": {"name": "NVIDIA H100 80GB HBM3", "memory": 80 * 2**30, "bandwidth": 3_350_000_000_000},
    "h200": {"name": "NVIDIA H200", "memory": 141_000_000_000, "bandwidth": 4_800_000_000_000},
}


def target_config(kind: str) -> str:
    """XLA's description of a GPU, a `GpuTargetConfigProto` as text.

    >>> "core_count: 132" in target_config("h200")
    True
    """
    return _HOPPER.format(**_BOARDS[kind])
