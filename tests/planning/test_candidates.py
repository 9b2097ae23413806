"""The candidates of a plan: the tensor parallelism of a model that has no room on one GPU, and impossible values."""

from __future__ import annotations

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.candidates.candidate import TENSOR_PARALLEL, make_candidates
from foredraft.sim.scenario import Scenario

LARGE = Scenario.model_validate({"model": {"target": "llama-3.1-70b"}})
STEPS = {"speculation.steps": [1]}


@pytest.mark.parametrize(
    ("scenario", "tried", "gpus", "sizes"),
    [
        (Scenario(), STEPS, None, {None}),
        (LARGE, {"speculation.algorithm": ["NONE"]}, None, {2}),
        (LARGE, {"speculation.algorithm": ["NONE", "EAGLE3"], **STEPS}, None, {2, 4}),  # drafts need more room
        (LARGE, {**STEPS, TENSOR_PARALLEL: [1]}, None, {1}),  # as it was asked
        (LARGE, STEPS, 2, {1, 2}),
        (LARGE, {**STEPS, "hardware.gpu": ["H100", "B300"]}, None, {None}),  # it has room on one of them
        (LARGE, {**STEPS, "hardware.gpu": ["L40S"]}, None, {4}),
    ],
)
def test_a_model_that_has_no_room_gets_the_parallelism_at_which_it_has(scenario, tried, gpus, sizes):
    found = make_candidates(scenario, tried, gpus)
    assert {one.settings.get(TENSOR_PARALLEL) for one in found} == sizes
    assert all(
        (f"tensor_parallel {one.gpus_per_unit}" in one.name) == (TENSOR_PARALLEL in one.settings) for one in found
    )


@pytest.mark.parametrize(
    ("tried", "words"),
    [
        ({"engine.eviction_policy": ["lur", "lru"]}, "--try: engine.eviction_policy: unknown eviction policy 'lur'"),
        (
            {"acceptance.preset": ["chat"], "acceptance.mean_length": [2.0]},
            "--try: acceptance.mean_length: contradicts preset",
        ),
    ],
)
def test_values_that_no_candidate_can_have_are_refused_before_a_run(tried, words):
    with pytest.raises(ConfigError, match=words):
        make_candidates(Scenario(), {**STEPS, **tried}, None)
