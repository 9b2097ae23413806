"""How the experts of a token are chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Router:
    """Which of a router's scores win, and what weighs the experts that they choose. With more than one group, experts
    are chosen from the groups with the greatest score, or with a bias of the choice from those with the two greatest
    together."""

    top_k: int
    is_sigmoid: bool = False  # of each score; else shares of all
    num_groups: int = 1
    top_groups: int = 1
    normalized: bool = False  # the weights of the chosen sum to 1
    epsilon: float = 0.0  # under their sum
    scale: float = 1.0
