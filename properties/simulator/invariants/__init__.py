"""SIM-01 … SIM-16: `runs` compares what a simulator answers with itself, `books` with what its log says."""

from . import books, runs

__all__ = ["books", "runs"]
