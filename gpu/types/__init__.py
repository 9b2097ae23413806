"""The types that kernels, operations, models, batches and the executor share. They import nothing of `gpu/`."""
