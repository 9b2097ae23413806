"""A tuned table as the files and arguments of other servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.adaptive.config import AdaptiveConfig, load_adaptive_config
from ...core.adaptive.interchange import export_table, to_json
from ...core.errors import ConfigError
from ...sim.cost.hardware import lookup_gpu
from ...sim.cost.server import server_profile
from ...sim.scenario import Scenario
from .sglang import PROFILE as SGLANG_PROFILE
from .sglang import VICTIMS

SGLANG_VERSION = "0.5.23"
METHODS = {  # algorithm -> its name in SGLang, vLLM and TensorRT-LLM, "" where a server has none
    "EAGLE": ("EAGLE", "eagle", ""),
    "EAGLE3": ("EAGLE3", "eagle3", "Eagle3"),
    "MULTI_LAYER_EAGLE": ("EAGLE", "mtp", "MTP"),
    "STANDALONE": ("STANDALONE", "draft_model", "Draft_Target"),
    "NGRAM": ("NGRAM", "ngram", "NGram"),
}


def server_files(
    scenario: Scenario, table: Mapping[str, Any], schedule: Mapping[str, Any] | None, max_batch_size: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of files by name and, for servers without a file, the reason by the server's name.

    `table` is in our own format; `schedule` one with a single number of steps for each range, for servers that take no
    other. `max_batch_size`: the requests that run at once, of each group of data-parallel attention.
    """
    algorithm, topk = scenario.speculation.algorithm, scenario.speculation.topk
    names = METHODS.get(algorithm)
    files, left_out = {"adaptive.json": to_json(load_adaptive_config(table)) + "\n"}, {}
    if names is None or topk > 1:
        reason = f"there is no {algorithm}" if names is None else "a table is for chains, the scenario has trees"
        return files, dict.fromkeys(("SGLang", "vLLM", "TensorRT-LLM"), reason)
    sglang, vllm, trtllm = names
    adapts = algorithm in ("EAGLE", "EAGLE3") and scenario.hardware.attention_data_parallel == 1
    chosen = table if adapts or len(load_adaptive_config(table).candidate_steps) == 1 else None
    if chosen is None:
        left_out["SGLang"] = "its adaptive steps are for EAGLE and EAGLE3 without data-parallel attention"
    else:
        try:
            scheduling = sglang_scheduling(scenario, max_batch_size)
            files |= _sglang_files(load_adaptive_config(chosen), sglang, algorithm == "MULTI_LAYER_EAGLE", scheduling)
        except ConfigError as error:
            left_out["SGLang"] = str(error)
    if schedule is None:
        none = "it takes one number of steps for each range, and no such schedule holds"
        return files, {**left_out, "vLLM": none, "TensorRT-LLM": none}
    config = load_adaptive_config(schedule)
    try:
        speculative = {"method": vllm, **json.loads(export_table(config, "vllm", max_batch_size))}
        if not speculative["num_speculative_tokens"]:
            left_out["vLLM"] = "no batch size is to speculate: leave --speculative-config out"
        else:
            files["vllm-speculative-config.json"] = json.dumps(speculative) + "\n"
        if not trtllm:
            left_out["TensorRT-LLM"] = f"its backend pytorch has no {algorithm}"
            return files, left_out
        keys = export_table(config, "trtllm", max_batch_size).replace("\n", "\n  ")
        files["trtllm.yaml"] = f"speculative_config:\n  decoding_type: {trtllm}\n  {keys}\n"
    except ConfigError as error:
        left_out["TensorRT-LLM"] = str(error)
    return files, left_out


def sglang_scheduling(scenario: Scenario, max_batch_size: int) -> list[str]:
    """Return the arguments for the batch limit, and for the rules of scheduler and front end that the scenario gives.

    SGLang's own batch limit depends on whether it speculates.
    """
    engine, hardware = scenario.engine, scenario.hardware
    profile, groups = server_profile(SGLANG_PROFILE), hardware.attention_data_parallel
    arguments = ["--max-running-requests", str(max_batch_size * groups)]
    if engine.guarantee_output:
        usual = profile.scheduling(lookup_gpu(hardware.gpu), groups, has_draft=True)["guarantee_output"]
        arguments += ["--schedule-conservativeness", f"{engine.guarantee_output / usual:.6g}"]
    policy = next((name for name, victim in VICTIMS.items() if victim == engine.retract_first), None)
    given = {
        "--retraction-policy": policy,
        "--scheduler-recv-interval": scenario.front_end.poll_steps,
        "--stream-interval": scenario.front_end.stream_interval,
    }
    for name, value in given.items():
        arguments += [] if value is None else [name, str(value)]
    return arguments


def _sglang_files(
    config: AdaptiveConfig, algorithm: str, multi_layer: bool, scheduling: Sequence[str]
) -> dict[str, str]:
    """Return the adaptive file and the arguments that name it, or the arguments of fixed steps alone."""
    steps = config.candidate_steps
    if steps == (0,):  # it does not speculate
        return {"sglang.args": " ".join(scheduling) + "\n"}
    multi = ["--enable-multi-layer-eagle"] if multi_layer else []
    arguments = [*scheduling, "--speculative-algorithm", algorithm, *multi]
    if len(steps) == 1:
        return {"sglang.args": " ".join([*arguments, *shape_arguments(steps[0])]) + "\n"}
    name = "sglang-adaptive.json"
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", name]
    text = export_table(config, f"sglang-{SGLANG_VERSION}")
    begin = steps[len(steps) // 2]
    return {name: text + "\n", "sglang.args": " ".join([*arguments, *adaptive, *shape_arguments(begin)]) + "\n"}


def shape_arguments(steps: int, topk: int = 1, nodes: int | None = None) -> list[str]:
    """Return SGLang's arguments for drafts of one shape. nodes: of a tree, or of a chain if it is None."""
    given = {"num-steps": steps, "eagle-topk": topk, "num-draft-tokens": nodes or steps + 1}
    return [word for name, value in given.items() for word in (f"--speculative-{name}", str(value))]
