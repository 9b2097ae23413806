"""The invariants of an engine, a file per group; each registers its checkers when it is loaded."""

from . import budgets, groups, kv, order, progress, requests, twins

__all__ = ["budgets", "groups", "kv", "order", "progress", "requests", "twins"]
