"""The configurations that a plan compares, and the rounds of each by the cost model."""
