"""The real executor beside its simulation: its own steps measured, and one workload run on both."""
