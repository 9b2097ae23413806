"""The table `engine` of a scenario: sizes of the engine, and what servers let a user set about their rules.

`hardware.server` chooses the rules themselves (docs/servers.md).
"""

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
        "when the engine is idle, and is estimated anew after a retraction; 1: it stays; default: 0.14 (SGLang: "
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR)",
    )
    guarantee_rounds: Count | None = Field(
        default=None,
        description="decode rounds in which the share falls so far; default: 600 (SGLang: "
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS)",
    )
    guarantee_limit: Count | None = Field(
        default=None,
        description="tokens of a request's remaining output that guarantee_output counts at most; default: 4096 "
        "(SGLang: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)",
    )
    retraction_policy: Literal["length", "priority"] | None = Field(
        default=None,
        description="which request gives way if no round fits, by the rules of SGLang (--retraction-policy). length: the "
        "one with the fewest emitted tokens, then the longest prompt; priority: the same within the lowest priority; "
        "default: length",
    )
    reserve_full_isl: bool | None = Field(
        default=None,
        description="what a newcomer must find free by the rules of vLLM (--scheduler-reserve-full-isl). true: its whole "
        "context; false: its first chunk; default: true",
    )
    batch_wait_rounds: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="decode rounds for which new requests wait for more of them at most, while others decode "
        "(TensorRT-LLM: batch_wait_timeout_iters); default: 0",
    )
    batch_wait_tokens: Share | None = Field(
        default=None,
        description="new requests do not wait if a step with them has this share of chunk_size in tokens (TensorRT-LLM: "
        "batch_wait_max_tokens_ratio); 0: they never wait; default: 0",
    )
    block_rounds: Count = Field(
        default=32, description="most rounds of one plan; 1 gives the same result (docs/design.md names the exceptions)"
    )
    preempt: bool = Field(default=False, description="retract lower priorities to admit a higher one")
    ageing_bound: Count = Field(default=256, description="how often higher priorities may overtake a request")
