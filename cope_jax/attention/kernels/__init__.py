"""The kernels of fused attention, a folder for each kind of device."""
