"""Faults in a simulated service: fault plans, their injection, and the promises that must hold under them."""
