"""The contract of a simulator: a service in, what happened in it out."""
