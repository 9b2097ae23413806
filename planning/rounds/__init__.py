"""Rounds by the cost model, what they cost, and whether speculation pays."""
