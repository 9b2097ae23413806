"""The table `engine` of a scenario: sizes of the engine, and the rules in which servers differ (docs/servers.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .table import Count, Positive, Share, Table


class EngineTable(Table):
    mode: Literal["overlap", "synchronous"] | None = Field(
        default=None,
        description="overlap: plan the next step while this one runs; synchronous: plan it afterwards; default: as in "
        "the server, mostly overlap",
    )
    page_size: Count = Field(default=1, description="KV slots per page")
    kv_slots: Count | None = Field(
        default=None, description="size of the KV pool in tokens; default: what fits into the device's memory"
    )
    max_running: Count | None = Field(
        default=None,
        description="most requests in a batch; default: the server's (foredraft 256, vLLM mostly 1024, others mostly "
        "2048)",
    )
    max_queue: Count | None = Field(default=None, description="most waiting requests; default: no limit")
    chunk_size: Count | None = Field(
        default=None, description="most prefill tokens of one step; default: the server's, mostly 8192"
    )
    max_step_tokens: Count | None = Field(
        default=None, description="most prefill and verify tokens of one step; default: no limit"
    )
    mixed: bool | None = Field(
        default=None,
        description="true: a step may mix prefill and decode; false: prefill goes first; default: the server's way",
    )
    prefix_cache: bool = Field(
        default=True, description="cache prefixes of prompts with known content, in a radix tree"
    )
    host_cache_gb: Positive | None = Field(
        default=None,
        description="gigabytes of host memory behind the prefix cache of a replica, which keep what the device evicts "
        "(SGLang --hicache-size per rank, vLLM --kv-offloading-size); default: none",
    )
    host_cache_ratio: Positive | None = Field(
        default=None,
        description="the same as a multiple of the KV pool (SGLang --hicache-ratio)",
    )
    eviction_policy: str | None = Field(
        default=None,
        description="eviction from the prefix cache: lru, fifo, lfu; release: first what was given up first, from its "
        "end (vLLM); default: as in the server, mostly lru",
    )
    watermark: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None,
        description="share of the pool that admission leaves free; default: as in the server (vLLM 0: --watermark; "
        "others 0.01)",
    )
    guarantee_output: Share | None = Field(
        default=None,
        description="admit a request only if its whole output fits beside this share of the tokens that running "
        "requests may still emit; below 1 a request may be retracted; 0: only its prompt must fit; default: as in the "
        "server",
    )
    guarantee_floor: Share | None = Field(
        default=None,
        description="the share of guarantee_output falls to this part of itself with the decode rounds; it begins again "
        "when the engine is idle, and is estimated anew after a retraction; 1: it stays; default: as in the server "
        "(SGLang 0.14: SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR)",
    )
    guarantee_rounds: Count | None = Field(
        default=None,
        description="decode rounds in which the share falls so far; default: as in the server (SGLang 600: "
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS)",
    )
    guarantee_limit: Count | None = Field(
        default=None,
        description="tokens of a request's remaining output that guarantee_output counts at most; default: as in the "
        "server (SGLang 4096: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION; others: all)",
    )
    guarantee_fixed: bool | None = Field(
        default=None,
        description="count a request of a fixed length (workload.max_tokens = output) in full, not by the share; "
        "default: as in the server (SGLang: true since 0.5.22)",
    )
    retract_first: Literal["latest", "fewest_outputs", "lowest_then_fewest"] | None = Field(
        default=None,
        description="which request gives way if no round fits. latest: of the lowest priority, the latest; "
        "fewest_outputs: the one with the fewest emitted tokens, then the longest prompt (SGLang, --retraction-policy "
        "length); lowest_then_fewest: the same within the lowest priority (--retraction-policy priority); default: as "
        "in the server",
    )
    retracted_to: Literal["arrival", "tail"] | None = Field(
        default=None,
        description="where a retracted request waits. arrival: at its place by arrival; tail: behind all others of its "
        "priority (SGLang); default: as in the server",
    )
    cache_retracted: bool | None = Field(
        default=None,
        description="keep the KV of a retracted request in the prefix cache, until it is evicted; default: as in the "
        "server (SGLang: false)",
    )
    pause_until: Literal["commit", "launch", "plan"] | None = Field(
        default=None,
        description="after a retraction no request enters until the next decode round is committed, or only launched "
        "(SGLang), or in the same plan (vLLM); default: as in the server",
    )
    retry_after: Literal["change", "departure"] | None = Field(
        default=None,
        description="when a request that did not fit is tried again. change: after any event that may have made room; "
        "departure: when a running request has left (SGLang); default: as in the server",
    )
    admit_with: Literal["reserve", "context", "chunk"] | None = Field(
        default=None,
        description="what a newcomer must find free if guarantee_output is 0. reserve: its context, and the next rounds "
        "of all requests; context: its context (vLLM: scheduler_reserve_full_isl); chunk: its first chunk (vLLM "
        "0.18); default: as in the server",
    )
    row_slots: Literal["pipeline", "launched"] | None = Field(
        default=None,
        description="slots of a decoding request behind its last token. pipeline: for as many rounds as may be in "
        "flight; launched: for the launched rounds and one draft behind them (vLLM: num_lookahead_tokens); default: as "
        "in the server",
    )
    released_at: Literal["fence", "departure"] | None = Field(
        default=None,
        description="when the slots of a request that leaves are free. fence: when the last step in flight that may "
        "touch them is committed; departure: at once (vLLM); default: as in the server",
    )
    late_tokens: Literal["dropped", "delivered"] | None = Field(
        default=None,
        description="tokens that a step in flight computes for a request that has been retracted: dropped, or delivered "
        "(vLLM); default: as in the server",
    )
    sure_ends: Literal["run", "rest"] | None = Field(
        default=None,
        description="a request that surely ends with a round in flight: it runs on, or rests (vLLM); default: as in the "
        "server",
    )
    short_chunk: Literal["waits", "retracted"] | None = Field(
        default=None,
        description="a prompt in progress whose next chunk does not fit: it waits, or is retracted (vLLM); default: as "
        "in the server",
    )
    cached_at: Literal["commit", "launch"] | None = Field(
        default=None,
        description="when the computed part of a prompt is in the prefix cache: with the step's result, or at its launch "
        "(vLLM); default: as in the server",
    )
    lone_token: Literal["chunk", "round"] | None = Field(
        default=None,
        description="what a newcomer with one token left to compute takes of a step: that token, or a round with drafts "
        "(vLLM with speculation); default: as in the server",
    )
    batch_wait_rounds: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="decode rounds for which new requests wait for more of them at most, while others decode "
        "(TensorRT-LLM: batch_wait_timeout_iters); default: as in the server, mostly 0",
    )
    batch_wait_tokens: Share | None = Field(
        default=None,
        description="new requests do not wait if a step with them has this share of chunk_size in tokens (TensorRT-LLM: "
        "batch_wait_max_tokens_ratio); 0: they never wait; default: as in the server, mostly 0",
    )
    block_rounds: Count = Field(
        default=32, description="most rounds of one plan; 1 gives the same result (docs/design.md names the exceptions)"
    )
    preempt: bool = Field(default=False, description="retract lower priorities to admit a higher one")
    ageing_bound: Count = Field(default=256, description="how often higher priorities may overtake a request")
