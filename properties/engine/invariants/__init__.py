"""The invariants of an engine, a file per group; each registers its checkers when it is loaded."""

from . import kv, order, progress, requests, twins  # noqa: F401
