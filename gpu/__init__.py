"""The real executor: torch models and Triton kernels under the same engine that the simulator drives."""
