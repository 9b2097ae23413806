"""The metrics and the summary of a run, and what they are made of: the lives of its requests, its load over time, and
the parts of a run that several processes simulate."""
