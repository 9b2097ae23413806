"""Keys that cannot be as they are: each declares the condition (`RefusedIf`), and one loop judges them all."""

import pytest
from foredraft.core.errors import ConfigError
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario.table import RefusedIf, declared_keys
from foredraft.sim.scenario_file import at_origins, load_scenario

POOLS = ["disaggregation.prefill=1", "disaggregation.decode=1"]
DEEP = "speculation.adaptive={candidate_steps=[0,70]}"
CASES = {  # by key: settings, and what the message says beside the key
    "model.context_len": (["model.context_len=200000"], "200000 is beyond the 131072 positions of llama-3.1-8b"),
    "speculation.adaptive": (["speculation.topk=2", DEEP], "has a candidate of 70 steps; expected at most"),
    "acceptance.conditional": (["acceptance.preset=chat", "acceptance.conditional=[0.5]"], "contradicts preset"),
    "acceptance.mean_length": (["acceptance.conditional=[0.5]", "acceptance.mean_length=2.0"], "contradicts conditional"),
    "acceptance.recorded": (["acceptance.mean_length=2.0", "acceptance.recorded=x.csv"], "contradicts mean_length"),
    "speculation.accept_rule": (
        ["speculation.accept_rule=block", "speculation.topk=2"],
        "block verifies chains, and with topk 2 drafts are trees",
    ),
    "acceptance.look_up_share": (
        ["speculation.algorithm=HYBRID", "speculation.policy=confidence", "acceptance.look_up_share=0.5"],
        "is 0.5: with the policy confidence all rows draft by the head; expected 0",
    ),
    "acceptance.of_rule": (["acceptance.of_rule=rejection"], "what target keeps does not follow from it"),
    "engine.host_cache_gb": (
        ["engine.host_cache_gb=10.0", "engine.host_cache_ratio=2.0"],
        "and engine.host_cache_ratio are given: expected one of them",
    ),
    "engine.host_cache_ratio": (
        ["engine.host_cache_ratio=2.0", "engine.prefix_cache=false"],
        "is host memory behind the prefix cache, and engine.prefix_cache is false",
    ),
    "engine.eviction_policy": (["engine.eviction_policy=lur"], "'lur'"),
    "workload.curve": (["workload.arrivals=curve", "workload.curve=[0.0,0.0]"], "two rates at least, one of them above 0"),
    **{
        f"workload.{length}.{key}": ([f"workload.{length}={{kind='{kind}'{more}}}"], f"is missing; a {kind} length needs it")
        for length in ("prompt", "output")
        for key, kind, more in (
            ("value", "fixed", ""),
            ("high", "uniform", ""),
            ("values", "empirical", ""),
        )
    },
    **{
        f"workload.{length}.{key}": ([f"workload.{length}.{key}=none"], "is missing; a lognormal length needs it")
        for length in ("prompt", "output")
        for key in ("mean", "sigma")
    },
    "disaggregation.prefill": (["disaggregation.decode=2"], "0 engines for prefill: each of the two pools needs"),
    "disaggregation.decode": (["disaggregation.prefill=2"], "0 engines for decode: each of the two pools needs"),
    "disaggregation.ratio": (["disaggregation.ratio=2:1"], "2:1 does not divide 1 replicas"),
    "hardware.replicas": ([*POOLS, "hardware.replicas=3"], "3 contradicts 1 prefill and 1 decode engines; leave it out"),
    "disaggregation.rebalance_s": (
        [*POOLS, "hardware.prefill.gpu=H200", "disaggregation.rebalance_s=1.0"],
        "lets engines change their role, and the pools have unlike hardware",
    ),
    "disaggregation.hold_s": (["disaggregation.lease_s=5.0"], "5 must be more than lease_s, which is 5"),
}  # fmt: skip
ELSEWHERE = {  # need a profile of measured steps: tests/sim/cost/test_measured_steps.py
    "engine.kv_slots",
    "hardware.profile",
}


def test_every_condition_has_a_case():
    declared = {key for key, around in declared_keys(Scenario) if any(isinstance(one, RefusedIf) for one in around[-1])}
    assert declared - {"acceptance.preset"} == CASES.keys() | ELSEWHERE, (
        "the first of several keys is never the wrong one"
    )


@pytest.mark.parametrize("key", CASES)
def test_a_key_that_cannot_be_is_refused_with_its_place(key):
    settings, words = CASES[key]
    scenario, origins = load_scenario(None, settings)
    with pytest.raises(ConfigError) as caught:
        assemble(scenario)
    message = str(at_origins(caught.value, origins))
    assert f"{key}: " in message and words in message


def test_keys_that_cannot_be_are_named_at_once_with_unknown_names():
    scenario, _ = load_scenario(
        None,
        ["hardware.gpu=H10", "engine.host_cache_gb=10.0", "engine.prefix_cache=false", "disaggregation.lease_s=9.0"],
    )
    with pytest.raises(ConfigError) as caught:
        assemble(scenario)
    assert {problem.key for problem in caught.value.problems} == {
        "hardware.gpu", "engine.host_cache_gb", "disaggregation.hold_s",
    }  # fmt: skip


@pytest.mark.parametrize("more", ["trace", "concurrency"])
def test_what_a_trace_or_a_closed_loop_makes_no_use_of_is_not_refused(more, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:00,48,10\n2023-11-16 18:17:01,48,10\n")
    used = f"workload.trace={str(trace)!r}" if more == "trace" else "workload.concurrency=2"
    scenario, _ = load_scenario(None, [used, "workload.arrivals=curve"])
    assemble(scenario)
