"""The series that `/metrics` has, for each server whose names it can use: names, types, labels and buckets.

vLLM's are those of its version 0.33, SGLang's those of 0.5.23, as their packages define them for a text model. `ABSENT`
has the series that these servers export and this one does not, because nothing here knows their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

Buckets = tuple[float, ...]


def one_two_five(greatest: int) -> Buckets:
    """Return 1, 2, 5, 10, 20, 50 … up to `greatest`."""
    found: list[float] = []
    for power in count():
        for digit in (1, 2, 5):
            if digit * 10**power > greatest:
                return tuple(found)
            found.append(digit * 10**power)
    raise AssertionError("the powers never end")


# fmt: off
SECONDS: Buckets = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)
TOKENS: Buckets = one_two_five(10**9)  # as far as the context reaches
N: Buckets = (1, 2, 5, 10, 20)
PREEMPTIONS: Buckets = (1, 2, 3, 4, 5, 10, 20)
STEP_TOKENS: Buckets = tuple(2.0**power for power in (0, *range(3, 15)))
VLLM_FIRST: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
VLLM_NEXT: Buckets = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
VLLM_WHOLE: Buckets = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
SGLANG_FIRST: Buckets = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_NEXT: Buckets = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200, 0.400, 0.600, 0.800, 1, 2,
    4, 6, 8,
)
SGLANG_WHOLE: Buckets = (*SGLANG_FIRST, 600, 1200, 1800, 2400)
SGLANG_QUEUE: Buckets = (
    0, 0.001, 0.005, 0.010, 0.050, 0.100, 0.200, 0.500, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500,
    600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000,
)
SGLANG_TOKENS: Buckets = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000, 22500, 25000,
    27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000, 1100000,
)
# fmt: on
ALL_EDGES: Buckets = tuple(
    sorted(
        {
            *SECONDS,
            *TOKENS,
            *N,
            *PREEMPTIONS,
            *STEP_TOKENS,
            *VLLM_FIRST,
            *VLLM_NEXT,
            *VLLM_WHOLE,
            *SGLANG_FIRST,
            *SGLANG_NEXT,
            *SGLANG_WHOLE,
            *SGLANG_QUEUE,
            *SGLANG_TOKENS,
        }
    )
)  # fmt: skip
"""What is counted between: so each server's buckets come from the same counts."""


@dataclass(frozen=True, slots=True)
class Series:
    """One family of samples. `key` is what is measured, `label` the label that it has beside those of its engine.

    `per_engine` False: the server as a whole has one sample.
    """

    name: str
    kind: str  # gauge, counter, histogram
    key: str
    text: str
    label: str = ""
    buckets: Buckets = SECONDS
    per_engine: bool = True


def _vllm() -> Iterator[Series]:
    gauge, counter, histogram = "gauge", "counter", "histogram"
    yield Series("num_requests_running", gauge, "running", "Requests that have a row of the batch.")
    yield Series("num_requests_waiting", gauge, "waiting", "Requests that wait for a row or for memory.")
    text = "Requests that wait, by reason: capacity is a row or memory."
    yield Series("num_requests_waiting_by_reason", gauge, "waiting_by_reason", text, "reason")
    yield Series("kv_cache_usage_perc", gauge, "kv_use", "Share of KV slots that no new request can get, 0 to 1.")
    yield Series("cache_config_info", gauge, "cache_config", "The KV cache, as labels.")
    text = "Prompt tokens that were looked up in the prefix cache."
    yield Series("prefix_cache_queries", counter, "prefix_queries", text)
    yield Series("prefix_cache_hits", counter, "prefix_hits", "Prompt tokens that were found in the prefix cache.")
    text = "Prompt tokens that were looked up in host memory."
    yield Series("external_prefix_cache_queries", counter, "external_queries", text)
    text = "Prompt tokens that were found in host memory."
    yield Series("external_prefix_cache_hits", counter, "external_hits", text)
    text = "The adapters whose requests run and wait, as labels (with --lora-modules); now, in Unix seconds."
    yield Series("lora_requests_info", gauge, "adapters", text, per_engine=False)
    yield Series("prompt_tokens", counter, "prompt_tokens", "Tokens of prompts.")
    text = "Tokens of prompts, by where their KV came from."
    yield Series("prompt_tokens_by_source", counter, "prompt_by_source", text, "source")
    yield Series("prompt_tokens_cached", counter, "cached_tokens", "Prompt tokens whose KV was not computed.")
    text = "Prompt tokens that a prefix cache had, by its place."
    yield Series("prompt_tokens_cached_by_source", counter, "cached_by_source", text, "source")
    yield Series("generation_tokens", counter, "output_tokens", "Tokens of outputs.")
    yield Series("request_success", counter, "ended", "Requests that ended, by reason.", "finished_reason")
    text = "Requests that were refused because a queue was full, by its limit."
    yield Series("admission_rejections", counter, "rejected", text, "reason", per_engine=False)
    yield Series("num_preemptions", counter, "retractions", "Times that a running request was retracted.")
    text = "Time from arrival to the first token."
    yield Series("time_to_first_token_seconds", histogram, "ttft", text, buckets=VLLM_FIRST)
    text = "Time between two emissions of a request."
    yield Series("inter_token_latency_seconds", histogram, "itl", text, buckets=VLLM_NEXT)
    text = "Mean time per token after the first."
    yield Series("request_time_per_output_token_seconds", histogram, "tpot", text, buckets=VLLM_NEXT)
    text = "Time from arrival to the end."
    yield Series("e2e_request_latency_seconds", histogram, "e2e", text, buckets=VLLM_WHOLE)
    text = "Time from arrival to the first admission."
    yield Series("request_queue_time_seconds", histogram, "queue", text, buckets=VLLM_WHOLE)
    text = "Time from the first admission to the end."
    yield Series("request_inference_time_seconds", histogram, "inference", text, buckets=VLLM_WHOLE)
    text = "Time from the first admission to the first token."
    yield Series("request_prefill_time_seconds", histogram, "prefill", text, buckets=VLLM_WHOLE)
    text = "Time from the first token to the last."
    yield Series("request_decode_time_seconds", histogram, "decode", text, buckets=VLLM_WHOLE)
    text = "Retractions of a request."
    yield Series("request_num_preemptions", histogram, "request_retractions", text, buckets=PREEMPTIONS)
    yield Series("request_prompt_tokens", histogram, "request_prompt", "Tokens of a prompt.", buckets=TOKENS)
    yield Series("request_generation_tokens", histogram, "request_output", "Tokens of an output.", buckets=TOKENS)
    text = "Tokens of the longest output of a request."
    yield Series("request_max_num_generation_tokens", histogram, "longest_output", text, buckets=TOKENS)
    yield Series("request_params_n", histogram, "n", "Outputs that a request asks for with each prompt.", buckets=N)
    text = "Tokens that an output may have."
    yield Series("request_params_max_tokens", histogram, "max_tokens", text, buckets=TOKENS)
    text = "Tokens of a prompt whose KV was computed."
    yield Series("request_prefill_kv_computed_tokens", histogram, "request_computed", text, buckets=TOKENS)
    text = "Prompt tokens and output tokens of a step."
    yield Series("iteration_tokens_total", histogram, "step_tokens", text, buckets=STEP_TOKENS)
    yield Series("spec_decode_num_drafts", counter, "rounds", "Verified drafts: rounds, counted per request.")
    yield Series("spec_decode_num_draft_tokens", counter, "drafted", "Draft tokens that were verified.")
    yield Series("spec_decode_num_accepted_tokens", counter, "accepted", "Draft tokens that were accepted.")
    text = "Accepted draft tokens by their position in the draft."
    yield Series("spec_decode_num_accepted_tokens_per_pos", counter, "accepted_at", text, "position")


def _sglang() -> Iterator[Series]:
    gauge, counter, histogram, streams = "gauge", "counter", "histogram", "is_streaming"
    yield Series("num_running_reqs", gauge, "running", "Requests that have a row of the batch.")
    yield Series("num_queue_reqs", gauge, "waiting", "Requests that wait for a row or for memory.")
    yield Series("gen_throughput", gauge, "throughput", "Output tokens of the last second.")
    text = "Share of looked-up tokens that the prefix cache had, since the start."
    yield Series("cache_hit_rate", gauge, "hit_rate", text)
    text = "KV lengths of the newest decode batch, all together."
    yield Series("decode_sum_seq_lens", gauge, "sum_seq_lens", text)
    yield Series("token_usage", gauge, "kv_use", "Share of KV slots that no new request can get, 0 to 1.")
    yield Series("full_token_usage", gauge, "kv_use", "The same; there are no pools beside the one for full attention.")
    yield Series("num_used_tokens", gauge, "kv_used", "KV slots that no new request can get.")
    yield Series("kv_used_tokens", gauge, "kv_used", "KV slots that no new request can get.")
    yield Series("kv_available_tokens", gauge, "kv_free", "KV slots that are free.")
    yield Series("kv_evictable_tokens", gauge, "kv_evictable", "KV slots that the prefix cache holds and can give up.")
    text = "Tokens per verified draft, bonus included, since the start."
    yield Series("spec_accept_length", gauge, "accept_length", text)
    text = "Share of the verified draft tokens that were accepted, since the start."
    yield Series("spec_accept_rate", gauge, "accept_rate", text)
    yield Series("spec_num_steps", gauge, "steps", "Draft steps of the newest decode round.")
    yield Series("spec_num_draft_tokens", gauge, "nodes", "Nodes of the newest verify tree, root included.")
    yield Series("num_retracted_reqs", gauge, "retracted_now", "Requests that were retracted in the last second.")
    text = "KV slots of host memory that the prefix cache uses."
    yield Series("hicache_host_used_tokens", gauge, "host_used", text)
    yield Series("hicache_host_total_tokens", gauge, "host_slots", "KV slots of host memory behind the prefix cache.")
    yield Series("max_total_num_tokens", gauge, "kv_slots", "KV slots.")
    yield Series("page_size", gauge, "page_size", "KV slots of a page.")
    yield Series("num_pages", gauge, "pages", "Pages of KV slots.")
    yield Series("context_len", gauge, "context_len", "Longest prompt with its output.")
    text = "Times that a running request was retracted."
    yield Series("num_retracted_requests", counter, "retractions", text)
    yield Series("num_retracted_input_tokens", counter, "retracted_prompt", "Prompt tokens of retracted requests.")
    yield Series("num_retracted_output_tokens", counter, "retracted_output", "Output tokens of retracted requests.")
    yield Series("realtime_tokens", counter, "by_mode", "Tokens of steps, by what was done with them.", "mode")
    text = "Time from arrival to the first admission."
    yield Series("queue_time_seconds", histogram, "queue", text, buckets=SGLANG_QUEUE)
    outside = Series("", counter, "", "", per_engine=False)  # what its tokenizer counts
    yield replace(outside, name="prompt_tokens", key="prompt_of", text="Tokens of prompts.", label=streams)
    yield replace(outside, name="generation_tokens", key="output_of", text="Tokens of outputs.", label=streams)
    yield replace(outside, name="spec_verify_calls", key="rounds", text="Verified drafts, counted per request.")
    text = "Prompt tokens that a prefix cache had, by its place."
    yield replace(outside, name="cached_tokens", key="cached_by_source", text=text, label="cache_source")
    yield replace(outside, name="num_requests", key="requests_of", text="Requests that ended.", label=streams)
    yield replace(outside, name="num_aborted_requests", key="aborted", text="Requests that were aborted.")
    outside = replace(outside, kind=histogram)
    text = "Tokens of a prompt."
    yield replace(outside, name="prompt_tokens_histogram", key="request_prompt", text=text, buckets=SGLANG_TOKENS)
    text = "Tokens of a prompt whose KV was computed."
    name = "uncached_prompt_tokens_histogram"
    yield replace(outside, name=name, key="request_computed", text=text, buckets=SGLANG_TOKENS)
    text = "Tokens of an output."
    yield replace(outside, name="generation_tokens_histogram", key="request_output", text=text, buckets=SGLANG_TOKENS)
    text = "Time between two emissions of a request."
    yield replace(outside, name="inter_token_latency_seconds", key="itl", text=text, buckets=SGLANG_NEXT)
    outside = replace(outside, label=streams)
    text = "Time from arrival to the first token."
    yield replace(outside, name="time_to_first_token_seconds", key="ttft", text=text, buckets=SGLANG_FIRST)
    text, name = "Mean time per token after the first.", "request_time_per_output_token_seconds"
    yield replace(outside, name=name, key="tpot", text=text, buckets=SGLANG_NEXT)
    text = "Time from arrival to the end."
    yield replace(outside, name="e2e_request_latency_seconds", key="e2e", text=text, buckets=SGLANG_WHOLE)


def _own() -> Iterator[Series]:
    text = "Real time from a round's end until its text is at the client's socket."
    yield Series("response_delay_seconds", "histogram", "delay", text, per_engine=False)
    text = "Tokens per verified draft, bonus included, since the start."
    yield Series("spec_decode_accept_length", "gauge", "accept_length", text)
    yield Series("spec_decode_num_steps", "gauge", "steps", "Draft steps of the newest decode round.")
    text = "Requests that were refused because too many were being served."
    yield Series("requests_refused", "counter", "refused", text, per_engine=False)
    text = "How late the simulation is, in real seconds; 0 if it keeps up."
    yield Series("behind_real_time_seconds", "gauge", "behind", text, per_engine=False)
    text = "Greatest --speed that can be expected to hold at the load of the last seconds."
    yield Series("possible_speed", "gauge", "possible_speed", text, per_engine=False)
    text = "1 while the process of a worker lives, 0 once it is lost (with --disaggregate)."
    yield Series("worker_up", "gauge", "worker", text, "worker", per_engine=False)
    yield Series("steps_lost", "counter", "failures", "Steps of the device that failed.")


VLLM, SGLANG, OWN = tuple(_vllm()), tuple(_sglang()), tuple(_own())
STYLES: Mapping[str, tuple[tuple[str, Series], ...]] = {
    "foredraft": tuple(
        ("foredraft", replace(one, buckets=SECONDS) if one.name.endswith("_seconds") else one) for one in (*VLLM, *OWN)
    ),
    "vllm": (*(("vllm", one) for one in VLLM), *(("foredraft", one) for one in OWN)),
    "sglang": (*(("sglang", one) for one in SGLANG), *(("foredraft", one) for one in OWN)),
}
"""Style → its series, each with its prefix. What another server does not have keeps ours."""

ABSENT: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "mm_cache_*": "there are no images",
        "num_requests_kv_fetch_by_stage": "only a decode engine of vLLM has it",
        "corrupted_requests": "off by default: logits are not looked at",
        "watermark_requests": "off by default: texts have no marks",
        "kv_block_*": "off by default: the times of single blocks are not kept",
        "engine_sleep_state": "engines do not sleep",
    },
    "sglang": {
        "*swa_*": "one pool serves all layers",
        "max_total_num_tokens_swa": "one pool serves all layers",
        "*mamba_*": "one pool serves all layers",
        "lora_*": "adapters have no pool of their own",
        "dp_*": "ranks of data-parallel attention are one engine here",
        "*grammar*": "a simulation compiles no grammars",
        "num_so_requests": "a simulation has no structured outputs",
        "kv_transfer_*": "transfers are in the report of `simulate`",
        "num_prefill_*": "transfers are in the report of `simulate`",
        "*prealloc*": "transfers are in the report of `simulate`",
        "*decode_transfer*": "transfers are in the report of `simulate`",
        "*decode_host_receive*": "transfers are in the report of `simulate`",
        "*deferred_kv_release*": "transfers are in the report of `simulate`",
        "num_bootstrap_failed_reqs": "transfers are in the report of `simulate`",
        "num_transfer_failed_reqs": "transfers are in the report of `simulate`",
        "prefill_delayer_*": "prompts are not delayed",
        "prefill_effective_tokens": "prompts are not delayed",
        "estimated_*": "off by default",
        "*_memory_usage_gb": "`simulate` says what memory is used for",
        "startup_*": "nothing is loaded",
        "weight_load_duration_seconds": "nothing is loaded",
        "*cuda_graph*": "which steps run as a graph is not kept",
        "forward_execution_seconds": "times of the device are in the report of `simulate`",
        "fwd_occupancy": "times of the device are in the report of `simulate`",
        "utilization": "it is a share of what an objective allows, which is not known",
        "max_running_requests_under_SLO": "it is a share of what an objective allows, which is not known",
        "scheduler_*": "the scheduler's own process has none of these stages",
        "per_stage_req_latency_seconds": "the scheduler's own process has none of these stages",
        "get_loads_duration_seconds": "there is no /v1/loads",
        "routing_key_*": "requests have no routing keys",
        "num_unique_running_routing_keys": "requests have no routing keys",
        "*streaming_session*": "there are no sessions",
        "num_paused_reqs": "requests are not paused",
        "new_token_ratio": "what is reserved follows engine.guarantee_output",
        "spec_block_accept_length": "drafts are verified one by one",
        "spec_cap_length": "drafts are verified one by one",
    },
}
"""Style → the names, with * for any letters, that its server exports and this one does not, and why."""
