"""The answer of a plan: its candidates in order, which of them differ clearly, and what the best costs."""
