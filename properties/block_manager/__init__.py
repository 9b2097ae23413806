"""Managers of KV blocks that look up a prefix and allocate the rest in one go:
a contract, a plain manager, planted defects."""
