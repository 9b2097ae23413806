"""Many simulations that answer one question: a grid of settings, run over processes. Results are stored, so that a
stopped sweep can continue."""
