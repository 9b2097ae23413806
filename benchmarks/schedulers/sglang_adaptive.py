"""SGLang's choice of draft steps beside our policy `ema` with the profile's rule for tries after 0 steps."""

from __future__ import annotations

import importlib
from typing import Any

from foredraft.core.adaptive import AdaptiveStepSlot
from foredraft.sim.cost.server import PROFILES

from .sglang_decisions import SGLang
from .workloads import Draws

MODULE = "sglang.srt.speculative.adaptive_spec_params"
ROUNDS = 200


def compare_steps(release: SGLang, states: int) -> tuple[str, str, int, int]:
    """Return (decision, method of SGLang, histories, histories in which the steps are the same after every round)."""
    of_release = importlib.import_module(MODULE).AdaptiveStepSlot
    equal = sum(_is_equal(of_release, Draws(seed)) for seed in range(states))
    return "the number of draft steps", "AdaptiveStepSlot.update", states, equal


def _is_equal(of_release: Any, draws: Draws) -> bool:
    candidates = sorted({draws.up_to(7) for _ in range(draws.up_to(4, 1))} | ({0} if draws.happens(50) else set()))
    rule = {
        "candidate_steps": candidates,
        "ema_alpha": draws.up_to(10, 1) / 10,
        "update_interval": draws.up_to(6, 1),
        "warmup_batches": draws.up_to(12),
        "down_hysteresis": -draws.up_to(2) / 4,
        "ceiling_coeff": draws.up_to(2) / 1.0,
    }
    begin = candidates[draws.up_to(len(candidates) - 1)]
    theirs = of_release(begin, rule)
    ours = AdaptiveStepSlot(begin, {**rule, "probe_backoff": PROFILES["sglang-0.5"].probe_backoff})
    most = draws.up_to(7)  # of a draft's tokens are right
    for _ in range(ROUNDS):
        drafts = [min(draws.up_to(most), theirs.current_steps) for _ in range(draws.up_to(3, 1))]
        theirs.update(drafts)
        ours.update(drafts)
        if theirs.current_steps != ours.current_steps:
            return False
    return True
