"""The contract of tree acceptance: verify trees, what a target accepts of them, and what is moved behind it."""
