"""The contract of tree acceptance: verify trees, the nodes that a target accepts, and the moves that follow."""
