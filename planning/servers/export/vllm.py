"""The arguments of vLLM that a scenario says."""

from __future__ import annotations

import json
from typing import Any

from ....core.adaptive.interchange import export_table
from ....sim.assembly import Assembly
from ....sim.cost.memory import RESERVED
from ....sim.scenario.flags import VLLM_PAGE
from ..declared import values_to_write, words_of
from ..files import IN_ONE_PASS
from ..own_layers import WITH_DRAFT
from ..vllm import POOLS_CONNECTOR
from .arguments import Arguments, method_of, step_tokens, table_of

RULES: dict[str, dict[str, str]] = {
    "target": {},
    "rejection": {"draft_sample_method": "probabilistic"},
    "block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}
TRANSFER = {"kv_connector": POOLS_CONNECTOR, "kv_role": "kv_both"}


def devices(run: Assembly) -> list[str]:
    """Return the arguments for the devices of one replica."""
    hardware = run.scenario.hardware
    given = {
        "hardware.tensor_parallel": hardware.tensor_parallel,
        "hardware.attention_data_parallel": hardware.attention_data_parallel,
        "hardware.expert_parallel": hardware.expert_parallel > 1,
    }
    computed = {key: value for key, value in given.items() if value > 1 or value is True}
    return words_of(values_to_write(run.scenario, "vllm", computed=computed)[0])


def arguments(run: Assembly) -> Arguments:
    """Return the arguments behind the model and the devices. Raises ForedraftError for what vLLM has none for."""
    scenario, config, made = run.scenario, run.spec.config, Arguments()
    engine, hardware, model = scenario.engine, scenario.hardware, scenario.model
    reserved = RESERVED if hardware.reserved_fraction is None else hardware.reserved_fraction
    page_size = made.pages_of(run, "--block-size", VLLM_PAGE)
    blocks = None if engine.kv_slots is None else engine.kv_slots // (page_size or VLLM_PAGE)
    computed = {
        "engine.max_running": config.max_running,
        "engine.max_step_tokens": step_tokens(scenario),
        "engine.page_size": page_size,
        "engine.kv_slots": blocks,
        "model.weight_dtype": "fp8" if model.weight_dtype == "fp8" else None,
        "hardware.reserved_fraction": round(1 - reserved, 6) if hardware.kv_gb is None else None,
        "engine.host_cache_gb": _offloaded(run),
    }
    made.give_keys(scenario, "vllm", computed)
    made.note_weights(run, "fp8", "bf16")
    if run.pools.is_disaggregated:
        made.words += ["--kv-transfer-config", json.dumps(TRANSFER)]
    if (speculative := _speculation(run, made)) is not None:
        made.words += ["--speculative-config", json.dumps(speculative)]
    return made


def _offloaded(run: Assembly) -> float | None:
    """Return the host memory behind the prefix cache in GiB, of each group of data-parallel attention."""
    gigabytes = run.scenario.engine.host_cache_gb
    if gigabytes is None:
        return None
    return round(gigabytes * 1e9 / 2**30 / run.scenario.hardware.attention_data_parallel, 6)


def _speculation(run: Assembly, made: Arguments) -> dict[str, Any] | None:
    method, draft = method_of(run, "vLLM"), run.scenario.model.draft
    if method is None:
        return None
    made.note_head(run, '"model" of --speculative-config')
    found: dict[str, Any] = {"method": method, **IN_ONE_PASS.get(run.scenario.speculation.algorithm, {})}
    if run.scenario.speculation.algorithm in WITH_DRAFT and draft is not None:
        found["model"] = draft
    found |= RULES[run.scenario.speculation.accept_rule]
    steps = run.spec.adaptive.candidate_steps
    if len(steps) == 1:
        adaptive = {"enable_adaptive_verification": True} if run.spec.policy == "confidence" else {}
        return found | {"num_speculative_tokens": steps[0], **adaptive}
    schedule: dict[str, Any] = json.loads(export_table(table_of(run), "vllm", run.spec.config.max_running))
    return found | schedule
