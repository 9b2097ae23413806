"""Planted defects of simulators: each is a subclass of ours, with something in what it answers or is made of done
wrong."""

from .draws import DRAWS
from .reports import REPORTS
from .resources import RESOURCES

MUTANTS = (*DRAWS.mutants, *REPORTS.mutants, *RESOURCES.mutants)
