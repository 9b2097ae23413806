"""The arguments of trtllm-serve that a scenario says, and the YAML file of further options that they name."""

from __future__ import annotations

from typing import Any

import yaml

from ....core.adaptive.interchange import export_table
from ....core.errors import ForedraftError
from ....sim.assembly import Assembly
from ....sim.cost.server import server_profile
from ..command import STATES, values_to_write
from ..own_layers import WITH_DRAFT
from ..trtllm import BLOCK, FREE_FRACTION, GUARANTEED, KV, PROFILE
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
    made.give(
        {
            "--backend": "pytorch",
            "--max_batch_size": config.max_running,
            "--max_num_tokens": step_tokens(scenario),
            "--max_seq_len": scenario.model.context_len,
            "--extra_llm_api_options": OPTIONS,
        }
    )
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
    cache = {
        "enable_block_reuse": engine.prefix_cache,
        "tokens_per_block": made.pages_of(run, "tokens_per_block", BLOCK),
        "free_gpu_memory_fraction": hardware.free_fraction or FREE_FRACTION,
        "max_gpu_total_bytes": None if hardware.kv_gb is None else round(hardware.kv_gb * 1e9),
        "max_tokens": engine.kv_slots,
        "dtype": made.format_of(KV, scenario.model.kv_dtype, "KV"),
        "mamba_ssm_cache_dtype": made.format_of(STATES, scenario.model.state_dtype, "the state"),
    }
    options: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": engine.mode == "synchronous",
        "enable_attention_dp": hardware.attention_data_parallel > 1,
        "kv_cache_config": _present(cache),
        "cuda_graph_config": _graphs(run),
    }
    given: dict[str, Any] = {
        **{name.replace("-", "_"): value for name, value in values_to_write(scenario, "trtllm", "front_end").items()},
        "batch_wait_timeout_iters": engine.batch_wait_rounds,
        "batch_wait_max_tokens_ratio": engine.batch_wait_tokens,
    }
    if engine.guarantee_output is not None:
        policy = GUARANTEED if engine.guarantee_output == 1 else UTILIZED
        given["scheduler_config"] = {"capacity_scheduler_policy": policy}
    if (speculative := _speculation(run, made)) is not None:
        given["speculative_config"] = speculative
    return options | _present(given) | METRICS


def _graphs(run: Assembly) -> dict[str, Any] | None:
    """Return what is captured; None, which YAML writes as null, for nothing."""
    hardware = run.scenario.hardware
    if not hardware.cuda_graphs:
        return None
    if hardware.graph_sizes is not None:
        return {"enable_padding": True, "batch_sizes": [*hardware.graph_sizes]}
    usual = server_profile(PROFILE).graph_sizes(run.deployment.gpu, hardware.devices, run.spec.config.max_running)
    return {"enable_padding": True, "max_batch_size": usual[-1]}


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _speculation(run: Assembly, made: Arguments) -> dict[str, Any] | None:
    method, draft = method_of(run, "TensorRT-LLM"), run.scenario.model.draft
    if method is None:
        return None
    made.note_head(run, f"speculative_model of speculative_config in {OPTIONS}")
    found: dict[str, Any] = {"decoding_type": method}
    if run.scenario.speculation.algorithm in WITH_DRAFT and draft is not None:
        found["speculative_model"] = draft
    steps = run.spec.adaptive.candidate_steps
    if len(steps) == 1:
        found["max_draft_len"] = steps[0]
    else:
        found |= yaml.safe_load(export_table(table_of(run), "trtllm", run.spec.config.max_running))
    if method == "MTP":
        found["num_nextn_predict_layers"] = found["max_draft_len"]
    return found
