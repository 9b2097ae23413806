"""State machines of the serving core: no clock, no I/O, no randomness of its own, no torch and no simpy."""
