"""What the metrics of a run are made of: the lives of its requests, its load over time, and the parts of a run that
several processes simulate."""
