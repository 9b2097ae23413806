"""Draft heads beside those of EAGLE, and the configurations of all heads."""
