"""Faults in a simulated service: plans of them, their injection, and the promises that must hold all the same."""
