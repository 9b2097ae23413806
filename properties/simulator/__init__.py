"""The contract of a simulator: it is given a service, and answers with what happened in it."""
