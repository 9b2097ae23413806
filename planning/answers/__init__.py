"""The answer of a plan: its candidates in order, what can be told apart, and what the best costs."""
