"""Commands that answer questions by many simulations."""
