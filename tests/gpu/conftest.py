"""One thread for torch: the tests' tensors are tiny, and two workers with a thread pool each would only wait for each other."""

try:
    import torch
except ImportError:  # the tests here say so themselves
    pass
else:
    torch.set_num_threads(1)
