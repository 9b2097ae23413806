"""The table `engine` of a scenario: sizes of the engine, and what servers let a user set about their rules.

`hardware.server` chooses the rules themselves (docs/servers.md).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from . import conditions as when
from .flags import TRTLLM_PAGE, VLLM_PAGE, sglang, trtllm, vllm
from .refusals import no_host_memory, no_such_eviction, steps_do_not_tell_memory
from .table import Count, NoEffect, Positive, RefusedIf, ScenarioTable, Share

OF_RULES = NoEffect(when.rules_have_no_such_setting)


class EngineTable(ScenarioTable):
    mode: Annotated[
        Literal["overlap", "synchronous"] | None,
        NoEffect(when.mode_fell_back),
        sglang("disable-overlap-schedule", words={True: "synchronous"}, usual="overlap"),
        vllm("async-scheduling", words={True: "overlap", False: "synchronous"}),
        trtllm("disable-overlap-scheduler", words={True: "synchronous", False: "overlap"}, usual="overlap"),
    ] = Field(
        default=None,
        description="overlap: plan the next step while this one runs; synchronous: plan it afterwards; default: as in "
        "the server, mostly overlap",
    )
    page_size: Annotated[
        Count,
        sglang("page-size N"),
        vllm("block-size N", usual=VLLM_PAGE, writes=False),
        trtllm("kv-cache-config.tokens_per_block N", usual=TRTLLM_PAGE, writes=False),
    ] = Field(default=1, description="KV slots per page")
    kv_slots: Annotated[
        Count | None,
        RefusedIf(steps_do_not_tell_memory, "calibration"),
        sglang("max-total-tokens N", writes=False),
        vllm("num-gpu-blocks-override N", by="engine"),
        trtllm("kv-cache-config.max_tokens N"),
    ] = Field(default=None, description="size of the KV pool in tokens; default: what fits into the device's memory")
    max_running: Annotated[
        Count | None,
        sglang("max-running-requests N", by="engine"),
        vllm("max-num-seqs N", writes=False),
        trtllm("max-batch-size N", writes=False),
    ] = Field(
        default=None,
        description="most requests in a batch; default: the server's (foredraft 256, vLLM mostly 1024, others mostly "
        "2048)",
    )
    max_queue: Annotated[Count | None, sglang("max-queued-requests N"), vllm("max-num-queued-reqs N")] = Field(
        default=None, description="most waiting requests; default: no limit"
    )
    chunk_size: Annotated[
        Count | None,
        sglang("chunked-prefill-size N", by="engine"),
        vllm("max-num-batched-tokens N", "enable-chunked-prefill", by="engine"),
        trtllm("max-num-tokens N", "enable-chunked-prefill", by="engine"),
    ] = Field(default=None, description="most prefill tokens of one step; default: the server's, mostly 8192")
    max_step_tokens: Annotated[
        Count | None, vllm("max-num-batched-tokens N", by="engine"), trtllm("max-num-tokens N", by="engine")
    ] = Field(default=None, description="most prefill and verify tokens of one step; default: no limit")
    mixed: Annotated[bool | None, sglang("enable-mixed-chunk", words={True: True}, usual=False)] = Field(
        default=None,
        description="true: a step may mix prefill and decode; false: prefill goes first; default: the server's way",
    )
    prefix_cache: Annotated[
        bool,
        NoEffect(when.content_is_unknown, says=False, tells=True),
        sglang("disable-radix-cache", words={True: False}, usual=True),
        vllm("enable-prefix-caching", words={False: False}, usual=True),
        trtllm("kv-cache-config.enable_block_reuse N", words={True: True, False: False}, usual=True),
    ] = Field(default=True, description="cache prefixes of prompts with known content, in a radix tree")
    host_cache_gb: Annotated[
        Positive | None,
        RefusedIf(no_host_memory),
        sglang(
            "hicache-size N", "hicache-write-policy N", "enable-hierarchical-cache|enable-hicache", by="host_memory"
        ),
        vllm("kv-offloading-size N", by="engine"),
    ] = Field(
        default=None,
        description="gigabytes of host memory behind the prefix cache of a replica, which keep what the device evicts "
        "(SGLang --hicache-size per rank, vLLM --kv-offloading-size); default: none",
    )
    host_cache_ratio: Annotated[
        Positive | None,
        RefusedIf(no_host_memory),
        sglang("hicache-ratio N", "enable-hierarchical-cache", by="host_memory"),
    ] = Field(
        default=None,
        description="the same as a multiple of the KV pool (SGLang --hicache-ratio)",
    )
    eviction_policy: Annotated[
        str | None,
        NoEffect(when.eviction_is_unused),
        RefusedIf(no_such_eviction),
        sglang("radix-eviction-policy N", words={"lru": "lru", "lfu": "lfu"}, otherwise="{}: the cache evicts by lru"),
    ] = Field(
        default=None,
        description="eviction from the prefix cache: lru, fifo, lfu; release: first what was given up first, from its "
        "end (vLLM); default: as in the server, mostly lru",
    )
    watermark: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        NoEffect(when.outputs_are_guaranteed),
        vllm("watermark N", form="fraction"),
    ] = Field(
        default=None,
        description="share of the pool that admission leaves free; default: as in the server (vLLM 0: --watermark; "
        "others 0.01)",
    )
    guarantee_output: Annotated[
        Share | None,
        OF_RULES,
        sglang("schedule-conservativeness N", by="policies"),
        trtllm("scheduler-config.capacity_scheduler_policy N", by="engine"),
    ] = Field(
        default=None,
        description="admit a request only if its whole output fits beside this share of the tokens that running "
        "requests may still emit; below 1 a request may be retracted; 0: only its prompt must fit; default: as in the "
        "server",
    )
    guarantee_floor: Annotated[Share | None, OF_RULES, NoEffect(when.no_output_is_guaranteed)] = Field(
        default=None,
        description="the share of guarantee_output falls to this part of itself with the decode rounds; it begins again "
        "when the engine is idle, and is estimated anew after a retraction; 1: it stays; default: 0.14 (SGLang: "
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR)",
    )
    guarantee_rounds: Annotated[
        Count | None, OF_RULES, NoEffect(when.no_output_is_guaranteed), NoEffect(when.share_does_not_fall)
    ] = Field(
        default=None,
        description="decode rounds in which the share falls so far; default: 600 (SGLang: "
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS)",
    )
    guarantee_limit: Annotated[Count | None, OF_RULES, NoEffect(when.no_output_is_guaranteed)] = Field(
        default=None,
        description="tokens of a request's remaining output that guarantee_output counts at most; default: 4096 "
        "(SGLang: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)",
    )
    retraction_policy: Annotated[
        Literal["length", "priority"] | None,
        OF_RULES,
        sglang("retraction-policy N", words={"length": "length", "priority": "priority"}),
    ] = Field(
        default=None,
        description="which request gives way if no round fits, by the rules of SGLang (--retraction-policy). length: the "
        "one with the fewest emitted tokens, then the longest prompt; priority: the same within the lowest priority; "
        "default: length",
    )
    reserve_full_isl: Annotated[
        bool | None, OF_RULES, vllm("scheduler-reserve-full-isl", words={True: True, False: False})
    ] = Field(
        default=None,
        description="what a newcomer must find free by the rules of vLLM (--scheduler-reserve-full-isl). true: its whole "
        "context; false: its first chunk; default: true",
    )
    batch_wait_rounds: Annotated[
        Annotated[int, Field(ge=0)] | None,
        OF_RULES,
        NoEffect(when.requests_never_wait, says=0),
        trtllm("batch-wait-timeout-iters N", by="batch_wait", writes=True),
    ] = Field(
        default=None,
        description="decode rounds for which new requests wait for more of them at most, while others decode "
        "(TensorRT-LLM: batch_wait_timeout_iters); default: 0",
    )
    batch_wait_tokens: Annotated[
        Share | None,
        OF_RULES,
        NoEffect(when.requests_never_wait, says=0.0),
        trtllm("batch-wait-max-tokens-ratio N", by="batch_wait", form="fraction", writes=True),
    ] = Field(
        default=None,
        description="new requests do not wait if a step with them has this share of chunk_size in tokens (TensorRT-LLM: "
        "batch_wait_max_tokens_ratio); 0: they never wait; default: 0",
    )
    multi_step_rounds: Count = Field(
        default=32, description="most rounds of one plan; 1 gives the same result (docs/design.md names the exceptions)"
    )
    preempt: Annotated[
        bool,
        NoEffect(when.priorities_are_equal, says=False),
        sglang(
            "enable-priority-scheduling",
            "disable-priority-preemption",
            "schedule-policy N",
            by="engine",
            words={True: True},
            writes=True,
        ),
        vllm("scheduling-policy N", words={"fcfs": None, "priority": True}),
    ] = Field(default=False, description="retract lower priorities to admit a higher one")
    ageing_bound: Annotated[Count, NoEffect(when.priorities_are_equal)] = Field(
        default=256, description="how often higher priorities may overtake a request"
    )
