"""The invariants of an engine, a file per group; each registers its checkers when it is loaded."""

from . import groups, kv, order, progress, requests, twins

__all__ = ["groups", "kv", "order", "progress", "requests", "twins"]
