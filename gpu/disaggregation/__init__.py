"""Prefill and decode in processes of their own, on one machine: the parent routes requests, workers hand KV from pool
to pool.

parent   session ─ router ─ workers        control: JSON frames over a socket pair, one per worker
             │                  │
prefill0 ─ engine, PrefillSide ═╪═ link ═► decode0 ─ engine, DecodeSide
    torch.distributed: messages of `core.handoff`, page tensors
"""
