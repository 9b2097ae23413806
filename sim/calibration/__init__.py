"""Fits the simulator to what users have: its timing to measurements, a synthetic workload to a trace."""
