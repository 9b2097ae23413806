"""Planted defects of simulators: each is ours with one part done wrong, what it answers or what it is made of."""

from ....properties.harness.mutants import Mutant
from . import answers, parts

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "simulator", kind, caught_by)
    for kind, caught_by in (*answers.DEFECTS, *parts.DEFECTS)
)
