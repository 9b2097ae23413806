"""A candidate of a plan with its result, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

from ..candidates.candidate import Candidate
from ..search.judge import SearchFinding


@dataclass(frozen=True)
class Ranked:
    """A candidate and its result: the greatest load on `gpus` devices, or the smallest number of devices for the given
    load.

    `dropped`: it was not searched again after the first round. `first_share`: its load per cost in the first round, as
    a share of the greatest one. `equal`: it does not differ clearly from the best one; if dropped, by the first round.
    The others are 80 % intervals of the cost model, None where nothing is known or asked: `load_range` of the greatest
    load, `gpu_range` of the number of devices (an end that is not known is None), `taken_range` of the share that it
    takes of its tightest limit, `of_best_range` of its load as a share of the best one's. `rests_on` says what they
    rest on.
    """

    candidate: Candidate
    finding: SearchFinding
    gpus: int
    load: float
    dropped: bool = False
    first_share: float = 0.0
    equal: bool = False
    load_range: tuple[float, float] | None = None
    gpu_range: tuple[int | None, int | None] | None = None
    taken_range: tuple[float, float] | None = None
    of_best_range: tuple[float, float] | None = None
    rests_on: str = ""

    @property
    def holds(self) -> bool:
        return self.finding.value > 0
