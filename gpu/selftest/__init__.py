"""One command for a new machine. It tests correctness, in the order in which problems usually appear, and measures
speed."""
