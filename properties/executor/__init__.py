"""The contract of an executor: what runs the steps of an engine."""
