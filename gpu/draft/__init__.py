"""How each kind of drafter proposes its tokens, and what it keeps from one round to the next."""
