"""Real decoding on GPUs and CPUs: torch models, with Triton kernels or kernels that Numba compiles for a CPU, under
the same engine that the simulator drives."""
