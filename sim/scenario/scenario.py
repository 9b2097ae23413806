"""A scenario: everything that a simulated run depends on, validated all at once.

A scenario file is TOML with the tables below and those of `workload.py`. Every key has a default, so an empty file is a
run: Llama-3.1-8B on one H100, EAGLE-3 with adaptive steps, overlap scheduling, Poisson arrivals. `Scenario` is plain
data; `assembly` turns it into engines and actors.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from . import conditions as when
from .engine_table import EngineTable
from .flags import sglang, trtllm, vllm
from .hardware import Hardware
from .model import Model
from .refusals import (
    hold_is_no_longer_than_the_lease,
    pool_has_no_engine,
    ratio_does_not_divide,
    unlike_pools_keep_their_roles,
)
from .speculation import Acceptance, Speculation
from .table import Count, Engines, NoEffect, Policy, Positive, RefusedIf, ScenarioTable, Seconds
from .workload import Clients, Workload


class FrontEndTable(ScenarioTable):
    request_us: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        default=None,
        description="time per request of the process that takes requests (HTTP, chat template), which serves them in "
        "turn; default: the server's",
    )
    prompt_token_us: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        default=None, description="its time per prompt token (tokenizer); default: the server's"
    )
    poll_steps: Annotated[Count | None, sglang("scheduler-recv-interval N")] = Field(
        default=None,
        description="decode steps between two looks of the scheduler at its queue, as SGLang's "
        "--scheduler-recv-interval; it also looks after a step with prompts, and when nothing runs; default: the "
        "server's, mostly 1",
    )
    stream_interval: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None,
        sglang("stream-interval N"),
        vllm("stream-interval N"),
        trtllm("stream-interval N"),
    ] = Field(
        default=None,
        description="output tokens of a chunk that the server sends to a client (--stream-interval of SGLang and vLLM, "
        "stream_interval of TensorRT-LLM); the last chunk comes with the last token; default: the server's, 1",
    )
    first_chunk: Annotated[Literal["token", "interval"] | None, NoEffect(when.chunks_are_tokens, says="token")] = Field(
        default=None,
        description="the first chunk of a request. token: its first token alone, at once; interval: a whole chunk; "
        "default: the server's, token",
    )
    chunk_us: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        default=None,
        description="time per chunk of the process that sends output to clients, one chunk after the other; default: "
        "the server's",
    )
    output_token_us: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        default=None, description="its time per output token (detokenizer); default: the server's"
    )


class RouterTable(ScenarioTable):
    policy: Annotated[Policy, NoEffect(when.router_is_unused)] = Field(
        default="least_loaded", description="how a replica is chosen: round_robin, least_loaded, prefix_aware, random"
    )
    latency_us: Annotated[float, Field(ge=0, le=1e9)] = Field(
        default=50.0, description="latency from client to replica"
    )
    bandwidth_gbps: Annotated[float, Field(ge=1e-3)] = Field(
        default=10.0, description="bandwidth from client to replica, in Gbit/s"
    )


class Disaggregation(ScenarioTable):
    prefill: Annotated[
        Engines,
        NoEffect(when.not_disaggregated, says=0),
        RefusedIf(pool_has_no_engine),
        sglang("disaggregation-mode N", by="pools"),
        vllm("kv-transfer-config N", "disaggregation-mode N", "is-prefill-worker", by="pools"),
        trtllm("server-role N", "disaggregation-mode N", by="pools"),
    ] = Field(default=0, description="engines that only prefill; 0: every engine prefills and decodes")
    decode: Annotated[
        Engines,
        NoEffect(when.not_disaggregated, says=0),
        RefusedIf(pool_has_no_engine),
        sglang("disaggregation-mode N", by="pools"),
        vllm("kv-transfer-config N", "disaggregation-mode N", "is-prefill-worker", by="pools"),
        trtllm("server-role N", "disaggregation-mode N", by="pools"),
    ] = Field(default=0, description="engines that only decode")
    ratio: Annotated[str | None, NoEffect(when.not_disaggregated, says=None), RefusedIf(ratio_does_not_divide)] = Field(
        default=None, description="divides hardware.replicas, such as 2:1; replaces the two numbers"
    )
    prefill_policy: Annotated[Policy, NoEffect(when.pool_policy_is_unused)] = Field(
        default="least_loaded", description="how the prefill engine of a request is chosen"
    )
    decode_policy: Annotated[Policy, NoEffect(when.pool_policy_is_unused)] = Field(
        default="least_loaded", description="how the decode engine of a request is chosen"
    )
    latency_us: Annotated[float, Field(ge=0, le=1e9)] = Field(default=10.0, description="latency from engine to engine")
    bandwidth_gbps: Annotated[float, Field(ge=1e-3), NoEffect(when.pools_have_their_own)] = Field(
        default=400.0,
        description="bandwidth of each device's port in each direction, in Gbit/s; between two engines that of the slower",
    )
    layerwise: bool = Field(default=True, description="send KV layer by layer while the prompt is computed")
    rebalance_s: Annotated[Seconds | None, RefusedIf(unlike_pools_keep_their_roles, "unlike")] = Field(
        default=None, description="interval at which an engine may be emptied to change its role; default: never"
    )
    lease_s: Seconds = Field(
        default=2.0, description="how long a prefill engine waits for news before it tries once more"
    )
    hold_s: Annotated[Seconds, RefusedIf(hold_is_no_longer_than_the_lease)] = Field(
        default=5.0, description="how long a decode engine waits for KV; more than the lease"
    )
    fence_s: Seconds = Field(default=1.0, description="time until slots of an abandoned transfer are used again")


class Slo(ScenarioTable):
    ttft_ms: Positive | None = Field(default=None, description="limit of the time to first token")
    tpot_ms: Positive | None = Field(default=None, description="limit of the time per output token after the first")
    e2el_ms: Positive | None = Field(default=None, description="limit of the end-to-end latency")
    attainment: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.99, description="share of requests that a load must keep within all limits (plan)"
    )


class Scenario(ScenarioTable):
    """Everything that a run depends on. The same scenario and seed give the same event log, byte for byte."""

    name: str = Field(default="default", description="name that reports show")
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="seed of every draw; draws are keyed, so runs are comparable"
    )
    model: Model = Model()
    hardware: Hardware = Hardware()
    speculation: Speculation = Speculation()
    acceptance: Annotated[Acceptance, NoEffect(when.drafts_nothing)] = Acceptance()
    engine: EngineTable = EngineTable()
    workload: Workload = Workload()
    clients: Clients = Clients()
    front_end: FrontEndTable = FrontEndTable()
    router: RouterTable = RouterTable()
    disaggregation: Annotated[Disaggregation, NoEffect(when.not_disaggregated)] = Disaggregation()
    slo: Slo = Slo()
