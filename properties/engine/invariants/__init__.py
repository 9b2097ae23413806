"""The invariants of an engine, a file per group; each registers its checkers when it is loaded."""
