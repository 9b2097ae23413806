"""Planted defects of transports: each is a subclass of a part of the good one, with one move done wrong, in a way that
has been done wrong before."""

from .decode import DECODING
from .prefill import PREFILLING

MUTANTS = (*PREFILLING.mutants, *DECODING.mutants)
