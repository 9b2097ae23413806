"""Answers: the outputs of a request as they come, and how they are written to its client."""
