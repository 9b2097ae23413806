"""Compares the greedy text of two OpenAI-compatible endpoints, one with and one without speculation."""
