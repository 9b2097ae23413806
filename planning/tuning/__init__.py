"""Searches tables of draft steps for one workload, and compares them with their alternatives on seeds that the search
has not seen."""
