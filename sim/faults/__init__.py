"""Faults in a simulated service: who injects them, and what is promised all the same."""
