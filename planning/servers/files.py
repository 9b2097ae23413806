"""A tuned table as the files and arguments of other servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...core.adaptive.config import AdaptiveConfig, load_adaptive_config
from ...core.adaptive.interchange import export_table, to_json
from ...core.contract.step import RoundShape
from ...core.errors import ForedraftError
from ...sim.cost.draft import BLOCK_DRAFTERS, P_EAGLE, PARD
from ...sim.cost.server import server_profile
from ...sim.scenario import Scenario
from .declared import values_to_write, words_of
from .sglang import PROFILE as SGLANG_PROFILE
from .trtllm import PROFILE as TRTLLM_PROFILE
from .vllm import PROFILE as VLLM_PROFILE

SGLANG_VERSION = "0.5.23"
METHODS = {  # algorithm -> its name in SGLang, vLLM and TensorRT-LLM, "" where a server has none
    "EAGLE": ("EAGLE", "eagle", ""),
    "EAGLE3": ("EAGLE3", "eagle3", "Eagle3"),
    "MULTI_LAYER_EAGLE": ("EAGLE", "mtp", "MTP"),
    "STANDALONE": ("STANDALONE", "draft_model", "Draft_Target"),
    "NGRAM": ("NGRAM", "ngram", "NGram"),
    "SUFFIX": ("", "suffix", "SA"),
    P_EAGLE: ("", "eagle3", ""),
    PARD: ("", "draft_model", "PARD"),
    "DFLASH": ("DFLASH", "dflash", "DFlash"),
    "DFLASH2": ("DFLASH", "dflash", "DFlash"),
    "DSPARK": ("DSPARK", "dspark", "DSpark"),
}


IN_ONE_PASS = {P_EAGLE: {"parallel_drafting": True}, PARD: {"parallel_drafting": True}}
"""What vLLM needs beside the name."""


def server_files(
    scenario: Scenario, table: Mapping[str, Any], schedule: Mapping[str, Any] | None, max_batch_size: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of files by name and, for servers without a file, the reason by the server's name.

    `table` is in our own format; `schedule` one with a single number of steps for each range, for servers that take no
    other. `max_batch_size`: the requests that run at once, of each group of data-parallel attention. A table is tuned
    for the server that was simulated, so no other gets a file.
    """
    files, left_out = {"adaptive.json": to_json(load_adaptive_config(table)) + "\n"}, {}
    writers = {
        "SGLang": (SGLANG_PROFILE, lambda: _sglang_files(scenario, table, max_batch_size)),
        "vLLM": (VLLM_PROFILE, lambda: _vllm_file(scenario, schedule, max_batch_size)),
        "TensorRT-LLM": (TRTLLM_PROFILE, lambda: _trtllm_file(scenario, schedule, max_batch_size)),
    }
    for name, (profile, write) in writers.items():
        if server_family(scenario) != server_family(profile):
            left_out[name] = tuned_for_another(scenario, profile)
            continue
        try:
            files |= write()
        except ForedraftError as error:
            left_out[name] = str(error)
    return files, left_out


def server_family(of: Scenario | str) -> str:
    """Return the server of a scenario or of a profile without its release, such as "vllm"."""
    return (of if isinstance(of, str) else of.hardware.server).partition("-")[0]


def tuned_for_another(scenario: Scenario, profile: str) -> str:
    """Say why steps that were tuned in a scenario are not for the server of a profile."""
    simulated = scenario.hardware.server
    return f"the steps were tuned for {simulated}, whose times are others: tune with --set hardware.server={profile}"


def _method_of(scenario: Scenario, place: int) -> str:
    """Return the name of the scenario's algorithm in a server, by its place in METHODS. Raises ForedraftError for one
    that the server does not have."""
    algorithm = scenario.speculation.algorithm
    if scenario.speculation.topk > 1:
        raise ForedraftError("a table is for chains, the scenario has trees")
    method = METHODS.get(algorithm, ("", "", ""))[place]
    if not method:
        raise ForedraftError(f"there is no {algorithm}")
    return method


def _schedule_of(schedule: Mapping[str, Any] | None) -> AdaptiveConfig:
    if schedule is None:
        raise ForedraftError("it takes one number of steps for each range, and no such schedule holds")
    return load_adaptive_config(schedule)


def _vllm_file(scenario: Scenario, schedule: Mapping[str, Any] | None, max_batch_size: int) -> dict[str, str]:
    method = _method_of(scenario, 1)
    keys = json.loads(export_table(_schedule_of(schedule), "vllm", max_batch_size))
    if not keys["num_speculative_tokens"]:
        raise ForedraftError("no batch size is to speculate: leave --speculative-config out")
    own = IN_ONE_PASS.get(scenario.speculation.algorithm, {})
    return {"vllm-speculative-config.json": json.dumps({"method": method, **own, **keys}) + "\n"}


def _trtllm_file(scenario: Scenario, schedule: Mapping[str, Any] | None, max_batch_size: int) -> dict[str, str]:
    method = _method_of(scenario, 2)
    keys = export_table(_schedule_of(schedule), "trtllm", max_batch_size).replace("\n", "\n  ")
    return {"trtllm.yaml": f"speculative_config:\n  decoding_type: {method}\n  {keys}\n"}


def sglang_scheduling(scenario: Scenario, max_batch_size: int) -> dict[str, Any]:
    """Return, by key, the values of SGLang's arguments for the batch limit, and for the share of outputs that a
    newcomer leaves free.

    SGLang's own batch limit depends on whether it speculates.
    """
    engine, hardware = scenario.engine, scenario.hardware
    profile, groups = server_profile(SGLANG_PROFILE), hardware.attention_data_parallel
    usual = profile.rules_for(groups).guarantee_output
    conservativeness = f"{engine.guarantee_output / usual:.6g}" if engine.guarantee_output else None
    return {"engine.max_running": max_batch_size * groups, "engine.guarantee_output": conservativeness}


def _sglang_files(scenario: Scenario, table: Mapping[str, Any], max_batch_size: int) -> dict[str, str]:
    """Return the adaptive file and the arguments that name it, or the arguments of fixed steps alone."""
    method, algorithm = _method_of(scenario, 0), scenario.speculation.algorithm
    computed = sglang_scheduling(scenario, max_batch_size)
    given, _ = values_to_write(scenario, "sglang", "engine.retraction_policy", "front_end", computed=computed)
    scheduling = words_of(given)
    config = load_adaptive_config(table)
    steps = config.candidate_steps
    adapts = algorithm in ("EAGLE", "EAGLE3") and scenario.hardware.attention_data_parallel == 1
    if len(steps) > 1 and not adapts:
        raise ForedraftError("its adaptive steps are for EAGLE and EAGLE3 without data-parallel attention")
    if steps == (0,):  # it does not speculate
        return {"sglang.args": " ".join(scheduling) + "\n"}
    multi = ["--enable-multi-layer-eagle"] if algorithm == "MULTI_LAYER_EAGLE" else []
    arguments = [*scheduling, "--speculative-algorithm", method, *multi]
    if len(steps) == 1:
        shape = shape_arguments(RoundShape.chain(steps[0]), algorithm)
        return {"sglang.args": " ".join([*arguments, *shape]) + "\n"}
    name = "sglang-adaptive.json"
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", name]
    text = export_table(config, f"sglang-{SGLANG_VERSION}")
    begin = steps[len(steps) // 2]
    return {
        name: text + "\n",
        "sglang.args": " ".join([*arguments, *adaptive, *shape_arguments(RoundShape.chain(begin), algorithm)]) + "\n",
    }


def shape_arguments(shape: RoundShape, algorithm: str) -> list[str]:
    """Return SGLang's arguments for drafts of one shape. Block drafters take no steps and branches."""
    given = {"num-steps": shape.steps, "eagle-topk": shape.topk, "num-draft-tokens": shape.nodes}
    if algorithm in BLOCK_DRAFTERS:
        given = {"num-draft-tokens": shape.nodes}
    return [word for name, value in given.items() for word in (f"--speculative-{name}", str(value))]
