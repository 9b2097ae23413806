"""The table of a scenario that says on what a model runs: `[hardware]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...core.scheduler.config import EngineRole
from ..cost.hardware import CUSTOM, GPU, UnknownGPU, custom_gpu, known_gpus, lookup_gpu
from ..cost.host import GraphUnit
from ..cost.server import profile_name
from . import conditions as when
from .flags import FREE_FRACTION, sglang, trtllm, vllm
from .refusals import replicas_are_not_those_of_the_pools, unlike_pools_have_no_steps
from .table import Count, Engines, NoEffect, Positive, RefusedIf, ScenarioTable, Spread


class PoolHardware(ScenarioTable):
    gpu: str | None = Field(default=None, description="GPU of the engines of this pool; default: hardware.gpu")
    tensor_parallel: Count | None = Field(default=None, description="default: hardware.tensor_parallel")
    attention_data_parallel: Count | None = Field(default=None, description="default: hardware.attention_data_parallel")
    expert_parallel: Annotated[Count | None, NoEffect(when.no_experts, says=1)] = Field(
        default=None, description="default: hardware.expert_parallel"
    )
    gpus_per_node: Annotated[Count | None, NoEffect(when.on_one_node)] = Field(
        default=None, description="default: hardware.gpus_per_node, else as the pool's GPU has it"
    )
    bandwidth_gbps: Annotated[float, Field(ge=1e-3)] | None = Field(
        default=None, description="bandwidth of each device's port; default: disaggregation.bandwidth_gbps"
    )


def _within(low: float, high: float, unit: str) -> AfterValidator:
    """Return what refuses a number of another magnitude, and says the unit."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise ValueError(f"expected {unit}, from {low:,g} to {high:,g}")
        return value

    return AfterValidator(check)


_Tflops = Annotated[float, _within(1, 200_000, "dense TFLOP/s")]


class CustomGPU(ScenarioTable):
    """The numbers of a GPU that is not in the catalogue, or of one that differs from its entry there."""

    # The condition of the whole table stands at one of the keys that it must have, so that it is said once.
    memory_gb: Annotated[float, _within(1, 4000, "gigabytes"), NoEffect(when.another_gpu)] = Field(
        description="gigabytes (10⁹ bytes) of memory that the driver reports, such as 24"
    )
    bandwidth_gb_per_s: Annotated[float, _within(20, 100_000, "gigabytes per second")] = Field(
        description="gigabytes per second of the memory, such as 1008"
    )
    bf16_tflops: _Tflops = Field(description="dense TFLOP/s of matrix products with 16 bits, such as 165.2")
    fp8_tflops: _Tflops | None = Field(
        default=None,
        description="dense TFLOP/s with 8 bits; default: none, so that FP8 weights only save memory and traffic",
    )
    nvfp4_tflops: _Tflops | None = Field(default=None, description="dense TFLOP/s with NVFP4; default: none")
    mxfp4_tflops: _Tflops | None = Field(default=None, description="dense TFLOP/s with MXFP4; default: none")
    link_gb_per_s: Annotated[float, _within(0.5, 5000, "gigabytes per second and direction")] = Field(
        description="gigabytes per second and direction to the other GPUs of a node, such as 32"
    )
    multiprocessors: Count | None = Field(
        default=None, description="multiprocessors, among which matrix products are divided; default: 128"
    )
    power_w: Annotated[float, _within(5, 10_000, "watts")] | None = Field(
        default=None, description="watts of a board, such as 450; --explain prints them"
    )
    price: Positive | None = Field(default=None, description="price of an hour, as `foredraft plan --price custom=N`")

    @model_validator(mode="after")
    def _is_of_one_magnitude(self) -> CustomGPU:
        """Refuse rates that no GPU has together: TB/s for GB/s, PFLOP/s for TFLOP/s."""
        per_byte = self.bf16_tflops * 1e3 / self.bandwidth_gb_per_s
        if not 5 <= per_byte <= 2500:
            raise ValueError(
                f"bf16_tflops is {self.bf16_tflops:g} and bandwidth_gb_per_s {self.bandwidth_gb_per_s:g}: {per_byte:.3g} FLOP "
                "for each byte of memory traffic; expected 5 to 2500: are these TFLOP/s and GB/s?"
            )
        for name, rate in self.tflops.items():
            if not 0.5 <= rate / self.bf16_tflops <= 32:
                raise ValueError(
                    f"{name}_tflops is {rate:g}, and bf16_tflops {self.bf16_tflops:g}; expected 0.5 to 32 times as much"
                )
        return self

    @property
    def tflops(self) -> dict[str, float]:
        """The dense TFLOP/s by data type."""
        rates = {"bf16": self.bf16_tflops, "fp16": self.bf16_tflops, "fp8": self.fp8_tflops}
        rates |= {"nvfp4": self.nvfp4_tflops, "mxfp4": self.mxfp4_tflops}
        return {dtype: rate for dtype, rate in rates.items() if rate is not None}


class Hardware(ScenarioTable):
    gpu: Annotated[str, NoEffect(when.pools_have_their_own)] = Field(
        default="H100",
        description=f"{', '.join(known_gpus())}, or custom: the GPU of hardware.custom, which is the default if this is given",
    )
    custom: CustomGPU | None = Field(
        default=None, description="the numbers of another GPU: no measurement backs its times"
    )
    tensor_parallel: Annotated[
        Count,
        NoEffect(when.pools_have_their_own),
        sglang("tp-size|tensor-parallel-size N", "pp-size|pipeline-parallel-size N", by="parallel"),
        vllm(
            "tensor-parallel-size|tp N",
            "pipeline-parallel-size|pp N",
            "decode-context-parallel-size|dcp N",
            "prefill-context-parallel-size|pcp N",
            "speculative-config.draft_tensor_parallel_size N",
            by="parallel",
        ),
        trtllm("tensor-parallel-size|tp-size N", "pipeline-parallel-size|pp-size N", by="parallel"),
    ] = Field(default=1, description="devices that share each layer of one replica")
    attention_data_parallel: Annotated[
        Count,
        NoEffect(when.pools_have_their_own),
        sglang(
            "dp-size|data-parallel-size N",
            "attn-dp-size|attention-data-parallel-size N",
            "enable-dp-attention",
            by="parallel",
        ),
        vllm("data-parallel-size|dp N", by="parallel"),
        trtllm("enable-attention-dp", by="parallel"),
    ] = Field(
        default=1,
        description="groups of tensor_parallel devices in a replica, each with its own requests; they share the "
        "experts",
    )
    expert_parallel: Annotated[
        Count,
        NoEffect(when.pools_have_their_own),
        NoEffect(when.no_experts, says=1),
        sglang("ep-size|expert-parallel-size|ep N", writes=False),
        vllm("enable-expert-parallel|ep", by="parallel"),
        trtllm("moe-expert-parallel-size|ep-size|expert-parallel-size N", writes=False),
    ] = Field(
        default=1,
        description="ranks of a replica that hold whole routed experts; 1: every device has a part of each expert",
    )
    gpus_per_node: Annotated[
        Count | None,
        NoEffect(when.pools_have_their_own),
        NoEffect(when.on_one_node),
        sglang("nnodes N", by="parallel"),
        vllm("nnodes|n N", by="parallel"),
        trtllm("gpus-per-node N", by="parallel"),
    ] = Field(
        default=None,
        description="devices that a fast link connects; collectives of more devices use the network between nodes; "
        "default: 8, or 72 in a rack of GB200 or GB300",
    )
    replicas: Annotated[
        Engines,
        Field(ge=1),
        RefusedIf(replicas_are_not_those_of_the_pools),
        sglang("dp-size N", by="parallel"),
        vllm("data-parallel-size N", by="parallel"),
    ] = Field(default=1, description="number of engines behind the router")
    host_link_gbps: Positive | None = Field(
        default=None,
        description="gigabits per second from host memory to each device, for engine.host_cache_gb; default: four "
        "fifths of PCIe 4 or 5, or of NVLink-C2C, as the GPU has it",
    )
    reserved_fraction: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        NoEffect(when.kv_is_given),
        NoEffect(when.static_fraction_is_given),
        vllm("gpu-memory-utilization|device-memory-utilization N", by="engine"),
    ] = Field(
        default=None,
        description="share of the device memory that stays unused; default: 0.10; for SGLang and TensorRT-LLM the rest "
        "that static_fraction and free_fraction leave",
    )
    static_fraction: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        NoEffect(when.kv_is_given),
        sglang("mem-fraction-static N", form="share"),
    ] = Field(
        default=None,
        description="SGLang's mem-fraction-static: share for weights and KV of the memory that the driver leaves; "
        "graphs and activations get the rest; replaces reserved_fraction; default for SGLang: its own",
    )
    free_fraction: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        NoEffect(when.kv_slots_are_given),
        trtllm(
            "kv-cache-config.free_gpu_memory_fraction N",
            "free-gpu-memory-fraction|kv-cache-free-gpu-memory-fraction N",
            form="share",
            usual=FREE_FRACTION,
        ),
    ] = Field(
        default=None,
        description="TensorRT-LLM's free_gpu_memory_fraction: share for KV of the memory that weights, activations and "
        "graphs leave; replaces reserved_fraction; default for TensorRT-LLM: 0.9",
    )
    window_ratio: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        NoEffect(when.kv_slots_are_given),
        NoEffect(when.no_pool_of_windows),
        sglang("swa-full-tokens-ratio N", form="number"),
    ] = Field(
        default=None,
        description="tokens of SGLang's pool of layers with a window for each token of the KV pool; default: 0.8",
    )
    state_ratio: Annotated[
        Positive | None,
        NoEffect(when.kv_slots_are_given),
        NoEffect(when.no_pool_of_states),
        NoEffect(when.states_are_counted),
        sglang("mamba-full-memory-ratio N", form="number"),
    ] = Field(default=None, description="bytes of SGLang's pool of recurrent states for each byte of KV; default: 0.9")
    state_slots: Annotated[
        Count | None,
        NoEffect(when.kv_slots_are_given),
        NoEffect(when.no_pool_of_states),
        sglang("max-mamba-cache-size N"),
    ] = Field(
        default=None,
        description="states in SGLang's pool of recurrent states, 1, 3 or 5 for each request; default: by state_ratio",
    )
    kv_gb: Annotated[
        Positive | None,
        NoEffect(when.kv_slots_are_given),
        vllm("kv-cache-memory-bytes|kv-cache-memory N", form="bytes"),
        trtllm("kv-cache-config.max_gpu_total_bytes N", form="bytes", words={"0": None}),
    ] = Field(
        default=None,
        description="gigabytes of a device's memory for KV (vLLM --kv-cache-memory-bytes, a maximum beside free_fraction: "
        "TensorRT-LLM max_gpu_total_bytes); replaces reserved_fraction and static_fraction",
    )
    cuda_graphs: Annotated[
        bool,
        sglang("disable-cuda-graph", "disable-decode-cuda-graph", by="graphs", words={True: False}, writes=True),
        vllm(
            "enforce-eager",
            "optimization-level|O N",
            "compilation-config|cc.cudagraph_mode N",
            by="graphs",
            words={True: False},
            writes=True,
        ),
        trtllm("cuda-graph-config N", by="graphs"),
    ] = Field(default=True, description="capture a graph for each padded batch size and step count")
    graph_sizes: Annotated[
        list[Count] | None,
        NoEffect(when.no_graphs),
        sglang(
            "cuda-graph-bs-decode|cuda-graph-bs N...",
            "cuda-graph-max-bs-decode|cuda-graph-max-bs N",
            by="graphs",
            form="integers",
            writes=True,
        ),
        vllm(
            "cudagraph-capture-sizes N...",
            "max-cudagraph-capture-size N",
            "compilation-config.cudagraph_capture_sizes N",
            "compilation-config.max_cudagraph_capture_size N",
            by="graphs",
            form="integers",
            writes=True,
        ),
        trtllm("cuda-graph-config.batch_sizes N", "cuda-graph-config.max_batch_size N", by="graphs"),
    ] = Field(
        default=None,
        description="captured sizes; default: 1, 2, 4, 8, 16, … up to the largest batch, the server's limit or 512 "
        "tokens (1,024 for some GPUs)",
    )
    graph_unit: Annotated[GraphUnit | None, NoEffect(when.no_graphs)] = Field(
        default=None,
        description="unit of the captured sizes: rows of a batch, or tokens of a pass (as in vLLM); a larger pass is "
        "launched kernel by kernel; default: the server's unit",
    )
    piecewise_graphs: Annotated[bool, NoEffect(when.no_graphs)] = Field(
        default=False,
        description="capture a pass in pieces, between which the attention of each layer runs, as vLLM's V1 runner "
        "does with a schedule of draft steps; the device waits before and after each attention",
    )
    server: Annotated[
        str,
        AfterValidator(profile_name),
        trtllm("backend N", "config|extra-llm-api-options|extra-engine-args N", by="options"),
    ] = Field(
        default="foredraft",
        description="simulated server: foredraft; vllm, sglang or trtllm, the newest profile of each; or by the release of its "
        "times sglang-0.5 (rules of 0.5.23), vllm-0.18 (rules of 0.33), vllm-0.9, trtllm-1.x (rules of 1.3)",
    )
    release: Annotated[Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] | None, NoEffect(when.one_rule_of_memory)] = (
        Field(
            default=None,
            description="release of the server, such as 0.21, whose rules for memory hold (docs/servers.md); default: the "
            "oldest that the profile stands for",
        )
    )
    flashinfer_sampler: Annotated[bool, NoEffect(when.no_flashinfer)] = Field(
        default=False,
        description="FlashInfer samples, which takes less memory than to sort the logits: in images of vLLM until 0.11.0",
    )
    host: str | None = Field(
        default=None, description="host time per step: foredraft, vllm-0.10, sglang-overlap; default: the server's"
    )
    kernels: Literal["roofline", "measured", "auto"] = Field(
        default="auto",
        description="source of the times of passes: the roofline, or measured kernels (the extra `measured`); auto: "
        "measured kernels if there are some, else the roofline",
    )
    kernels_of: Annotated[Literal["sglang", "vllm", "trtllm"] | None, NoEffect(when.kernels_are_not_measured)] = Field(
        default=None, description="server whose measured kernels are used; default: the simulated server"
    )
    correction: Literal["published", "off"] = Field(
        default="off",
        description="published: the factor on the times of passes that published serving points of this deployment show, "
        "if there are some (docs/evidence/accuracy.md); off: as the cost model has them",
    )
    launch: Annotated[
        Literal["full-graph", "piecewise"] | None, vllm("compilation-config.cudagraph_mode N", by="graphs")
    ] = Field(
        default=None,
        description="piecewise: the host launches each draft pass; default: the server's; full-graph for foredraft",
    )
    device_jitter: Spread = Field(
        default=0.0, description="standard deviation of a step's device time, divided by its mean"
    )
    host_jitter: Spread = Field(
        default=0.0, description="standard deviation of a step's host time, divided by its mean"
    )
    profile: Annotated[str | None, RefusedIf(unlike_pools_have_no_steps, "unlike")] = Field(
        default=None, description="profile.json of `foredraft calibrate`: fitted or measured times"
    )
    prefill: Annotated[PoolHardware | None, NoEffect(when.not_disaggregated)] = Field(
        default=None,
        description="what the engines that only prefill have instead (disaggregation); default: what all have",
    )
    decode: Annotated[PoolHardware | None, NoEffect(when.not_disaggregated)] = Field(
        default=None, description="what the engines that only decode have instead; default: what all have"
    )

    @property
    def devices(self) -> int:
        """The devices of one replica."""
        return self.tensor_parallel * self.attention_data_parallel

    @model_validator(mode="before")
    @classmethod
    def _custom_is_chosen(cls, data: Any) -> Any:
        """A GPU whose numbers are given is the one that is simulated, where no other is named."""
        is_chosen = isinstance(data, dict) and data.get("custom") is not None
        return {"gpu": CUSTOM} | data if is_chosen else data

    def find_gpu(self, name: str) -> GPU:
        """Return the GPU called `name`: of the catalogue, or `custom`. Raises UnknownGPU."""
        if name.strip().lower() != CUSTOM:
            return lookup_gpu(name)
        if self.custom is None:
            raise UnknownGPU("custom is the GPU of the table hardware.custom, which is not given (memory_gb, …)")
        given = self.custom
        return custom_gpu(
            given.memory_gb,
            given.bandwidth_gb_per_s,
            given.tflops,
            given.link_gb_per_s,
            given.power_w,
            given.multiprocessors,
        )

    @property
    def device(self) -> GPU:
        """The GPU of these engines. Raises UnknownGPU."""
        return self.find_gpu(self.gpu)

    def pool(self, role: EngineRole) -> PoolHardware | None:
        """Return what the engines of this role have instead of the common values."""
        return {EngineRole.PREFILL: self.prefill, EngineRole.DECODE: self.decode}.get(role)

    def of_role(self, role: EngineRole) -> Hardware:
        """Return the hardware of the engines of this role: what their pool has instead, and the common values."""
        own = self.pool(role) or PoolHardware()
        return self.model_copy(update=own.model_dump(exclude_none=True, exclude={"bandwidth_gbps"}))

    @model_serializer(mode="wrap")
    def _without_common_pools(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out pools that have nothing of their own, and a release and ratios that are not given, so that the
        headers of other logs stay what they are."""
        dumped = dump(self)
        if not self.flashinfer_sampler:
            dumped.pop("flashinfer_sampler", None)
        omitted = ("custom", "prefill", "decode", "release", "window_ratio", "state_ratio", "state_slots")
        return {key: value for key, value in dumped.items() if value is not None or key not in omitted}
