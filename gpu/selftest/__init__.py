"""The parts of a self-test that look at the machine and the device alone: what it has, its kernels at the sizes of real
models, sessions in bfloat16, the speed. `foredraft.checks.selftest` runs them, and the contracts between them."""
