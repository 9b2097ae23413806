"""Many simulations that answer one question: a grid of settings, run over processes, kept so that a
stopped sweep goes on."""
