"""Fits the timing of the simulator to what users have measured."""
