"""Each kind of drafter: how it proposes tokens, and the state that it keeps from one round to the next."""
