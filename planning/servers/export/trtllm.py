"""The arguments of trtllm-serve that a scenario says, and the YAML file of further options that they name."""

from __future__ import annotations

from typing import Any

import yaml

from ....core.adaptive.interchange import export_table
from ....core.errors import ForedraftError
from ....sim.assembly import Assembly
from ....sim.cost.server import server_profile
from ....sim.scenario.flags import TRTLLM_PAGE
from ..declared import values_to_write
from ..own_layers import WITH_DRAFT
from ..trtllm import GUARANTEED, PROFILE
from .arguments import Arguments, method_of, step_tokens, table_of

OPTIONS = "trtllm.yaml"
METRICS = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
"""What the gauge of running requests needs (NVIDIA/TensorRT-LLM, tensorrt_llm/metrics/collector.py)."""
UTILIZED = "MAX_UTILIZATION"


def devices(run: Assembly) -> list[str]:
    """Return the arguments for the devices of one replica: --tp_size counts them all."""
    hardware = run.scenario.hardware
    given = {"--tp_size": hardware.devices, "--ep_size": hardware.expert_parallel}
    return [word for name, value in given.items() if value > 1 for word in (name, str(value))]


def arguments(run: Assembly) -> Arguments:
    """Return the arguments behind the model and the devices, with the file of options. Raises ForedraftError for what
    TensorRT-LLM has none for."""
    scenario, config, made = run.scenario, run.spec.config, Arguments()
    engine = scenario.engine
    if run.pools.is_disaggregated:
        message = "prefill and decode apart need a configuration of their network: export without disaggregation"
        raise ForedraftError(f"TensorRT-LLM has no arguments for this configuration: {message}")
    if scenario.hardware.attention_data_parallel > 1 and scenario.hardware.tensor_parallel > 1:
        message = "its attention is either tensor parallel or data parallel"
        raise ForedraftError(f"TensorRT-LLM has no arguments for this configuration: {message}")
    made.words += ["--backend", "pytorch", "--max_batch_size", str(config.max_running)]
    if (tokens := step_tokens(scenario)) is not None:
        made.words += ["--max_num_tokens", str(tokens)]
    if scenario.model.context_len is not None:
        made.words += ["--max_seq_len", str(scenario.model.context_len)]
    made.words += ["--extra_llm_api_options", OPTIONS]
    if engine.max_step_tokens is None and method_of(run, "TensorRT-LLM") is not None:
        text = (
            f"max_num_tokens ({config.chunk_size:,}) bounds prompts and drafts of a step together, the plan's steps had"
        )
        made.notes.append(f"{text} no such bound: set engine.max_step_tokens = {config.chunk_size} to plan with it")
    made.note_weights(run)
    made.notes.append("name the release of TensorRT-LLM in the image, in the place of RELEASE")
    made.files[OPTIONS] = yaml.safe_dump(_options(run, made), sort_keys=False)
    return made


def _options(run: Assembly, made: Arguments) -> dict[str, Any]:
    """Return the keys of the file."""
    scenario = run.scenario
    engine, hardware = scenario.engine, scenario.hardware
    values, notes = values_to_write(scenario, "trtllm", "model", "hardware", "engine", "front_end")
    made.notes += notes
    options: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "enable_attention_dp": hardware.attention_data_parallel > 1,
        "cuda_graph_config": _graphs(run),
    }
    if (page_size := made.pages_of(run, "tokens_per_block", TRTLLM_PAGE)) is not None:
        values["kv-cache-config.tokens_per_block"] = page_size
    if engine.guarantee_output is not None:
        values["scheduler-config.capacity_scheduler_policy"] = GUARANTEED if engine.guarantee_output == 1 else UTILIZED
    for argument, value in values.items():
        name, _, path = argument.replace("-", "_").partition(".")
        if path:
            options.setdefault(name, {})[path] = value
        else:
            options[name] = value
    if (speculative := _speculation(run, made)) is not None:
        options["speculative_config"] = speculative
    return options | METRICS


def _graphs(run: Assembly) -> dict[str, Any] | None:
    """Return what is captured; None, which YAML writes as null, for nothing."""
    hardware = run.scenario.hardware
    if not hardware.cuda_graphs:
        return None
    if hardware.graph_sizes is not None:
        return {"enable_padding": True, "batch_sizes": [*hardware.graph_sizes]}
    usual = server_profile(PROFILE).graph_sizes(run.deployment.gpu, hardware.devices, run.spec.config.max_running)
    return {"enable_padding": True, "max_batch_size": usual[-1]}


def _speculation(run: Assembly, made: Arguments) -> dict[str, Any] | None:
    method, draft = method_of(run, "TensorRT-LLM"), run.scenario.model.draft
    if method is None:
        return None
    made.note_head(run, f"speculative_model of speculative_config in {OPTIONS}")
    found: dict[str, Any] = {"decoding_type": method}
    if run.scenario.speculation.algorithm in WITH_DRAFT and draft is not None:
        found["speculative_model"] = draft
    if run.scenario.speculation.accept_rule != "target":
        made.note_rule(run)
    steps = run.spec.adaptive.candidate_steps
    if len(steps) == 1:
        found["max_draft_len"] = steps[0]
    else:
        found |= yaml.safe_load(export_table(table_of(run), "trtllm", run.spec.config.max_running))
    if method == "MTP":
        found["num_nextn_predict_layers"] = found["max_draft_len"]
    return found
