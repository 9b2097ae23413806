"""Prefill and decode on engines of their own: pools, the network between them, and who sends what to whom."""
