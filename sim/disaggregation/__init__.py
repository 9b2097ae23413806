"""Prefill and decode on separate engines: pools, the network between them, and routing."""
