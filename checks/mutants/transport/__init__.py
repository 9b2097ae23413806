"""Planted defects of transports: each is the good one with one move done wrong, in a way that has been done wrong before."""

from __future__ import annotations

from ....core.handoff import DecodeSide, PrefillSide
from ....core.scheduler.engine import Engine
from ....properties.harness.mutants import Mutant
from ...transport.handoff_subject import HandoffTransport
from . import peers, sides


def of_prefill(kind: type[PrefillSide]) -> type[HandoffTransport]:
    return type(kind.__name__, (HandoffTransport,), {"prefill_side": kind})


def of_decode(kind: type[DecodeSide]) -> type[HandoffTransport]:
    return type(kind.__name__, (HandoffTransport,), {"decode_side": kind})


def of_engine(kind: type[Engine]) -> type[HandoffTransport]:
    return type(kind.__name__, (HandoffTransport,), {"engine": kind})


_DEFECTS = (
    *((of_prefill(kind), kind, caught_by) for kind, caught_by in (*sides.PREFILL_SIDES, *peers.PREFILL_SIDES)),
    *((of_decode(kind), kind, caught_by) for kind, caught_by in (*sides.DECODE_SIDES, *peers.DECODE_SIDES)),
    *((of_engine(kind), kind, caught_by) for kind, caught_by in sides.ENGINES),
    *((kind, kind, caught_by) for kind, caught_by in (*sides.TRANSPORTS, *peers.TRANSPORTS)),
)
"""(how it is made, the class with the defect, the invariants of which one must catch it)."""

MUTANTS = tuple(Mutant(kind.__name__, kind.__doc__, "transport", make, caught_by) for make, kind, caught_by in _DEFECTS)
