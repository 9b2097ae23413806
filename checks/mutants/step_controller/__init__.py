"""Planted defects of step controllers: of parts of ours, done wrong as it has been done wrong before, and of none."""

from .controllers import OF_POLICIES
from .no_policy import OF_NO_POLICY

MUTANTS = (*(mutant for defects in OF_POLICIES for mutant in defects.mutants), *OF_NO_POLICY)
