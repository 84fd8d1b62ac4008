"""How much of a device's arithmetic a model uses, given its FLOPs, and the peaks of devices."""

PEAK_FLOPS: dict[str, float | None] = {
    # Cloud TPU's pages; a device is a chip, but in v2, v3 and 7x, where it is one of two cores.
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    # NVIDIA's data sheets, half of what they state with sparsity.
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H100": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200": 989.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA RTX 6000 Ada": 364.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop": None,  # slower, by how much the maker decides
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5090 Laptop": None,
}
"""Dense bfloat16 FLOP/s a device, sums in float32, by the words with which JAX's `device_kind` begins."""


def peak_flops(device_kind: str) -> float | None:
    """The peak of a device, from the longest entry of `PEAK_FLOPS` that its kind begins with; None if none is known.

    Entries match whole words: an A1000 is no A100.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("TPU v5 lite"), peak_flops("cpu")
    (989500000000000.0, 197000000000000.0, None)
    """
    found = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind) and not device_kind[len(kind) :][:1].isalnum()]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def mfu(tokens_per_second: float, flops_per_token: float, devices: int, peak: float) -> float:
    """Model FLOPs utilisation, the share of the devices' peak that the model's FLOPs take: 1 is all of it.

    >>> mfu(tokens_per_second=1000, flops_per_token=8e9, devices=4, peak=10e12)
    0.2
    """
    return tokens_per_second * flops_per_token / (devices * peak)
