"""Target and draft models as forward passes over ragged batches of tokens."""
