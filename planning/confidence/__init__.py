"""How sure the numbers of many simulations are: means over seeds, and what errors of the cost model do to a plan."""
