"""The invariants of an engine, a file per group; each registers its checkers when it is loaded."""

from . import kv, order, progress, requests, twins

__all__ = ["kv", "order", "progress", "requests", "twins"]
