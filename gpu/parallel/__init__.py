"""Processes that work together: their supervision, their links, and pages of KV that travel on these. And one model on
several devices: each process, a rank, has a part of every matrix, and all run the same steps.

parent   session ─ engine ─ RankedExecutor       control: frames over a socket pair, one per rank
         │            │             │
       rank 0       rank 1  …     rank N − 1     each: TorchExecutor over its part of the model
         └───── sums and gathers ─────┘          torch.distributed: NCCL on GPUs, gloo on CPUs

The parent is the command's process, or a worker of a disaggregated session: then rank i of one worker exchanges pages
of KV with rank i of another.
"""
