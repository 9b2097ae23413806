"""Planted defects of engines: each is a subclass of a part of ours, done wrong in a way that has happened before."""

from .budgets import BUDGETS
from .groups import GROUPS
from .plans import PLANS
from .requests import PLAIN, REQUESTS, TWINS
from .waiting import WAITING

MUTANTS = (
    *REQUESTS.mutants,
    *PLANS.mutants,
    *PLAIN.mutants,
    *TWINS.mutants,
    *WAITING.mutants,
    *GROUPS.mutants,
    *BUDGETS.mutants,
)
