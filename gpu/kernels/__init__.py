"""Device kernels, one file each: the Triton kernel, its plain-torch twin, and the bytes that it must move."""
