"""The contract of a simulator: it takes a service, and returns the events of its run."""
