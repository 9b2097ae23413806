"""What a decode round should take on a GPU: the launches that the real executor makes, at the simulator's prices.

    foredraft bench --random-weights llama-3.1-8b --steps 3 --acceptance 2.8 --estimate h100

A first run on that GPU then shows where it differs.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.draws import request_key
from ..core.errors import ForedraftError, count_of
from ..gpu.kernels.layers.flash import DeviceTraits
from ..gpu.measure.plan import ArmPlan, BenchPlan, acceptance_of_arm
from ..gpu.measure.shapes import meta_models
from ..gpu.models.weights import products_of
from ..sim.cost.deployments.evidence import TPOT, Evidence, Place, published_evidence
from ..sim.cost.efficiency import Efficiency, default_efficiency
from ..sim.cost.hardware import GPU, Parallelism, lookup_gpu
from .launches import ATTENTION, DRAFT, EXCHANGED, GROUPS, TARGET, KernelLaunch, count_launches

CAPABILITIES = {
    **dict.fromkeys(("A100", "A100-40G"), (80, 163)),
    **dict.fromkeys(("A10", "RTX 3090"), (86, 99)),
    **dict.fromkeys(("L4", "L20", "L40", "L40S", "RTX 4090", "RTX 6000 Ada"), (89, 99)),
    **dict.fromkeys(("H100", "H200", "H800", "H20"), (90, 227)),
    **dict.fromkeys(("B200", "GB200"), (100, 227)),
    **dict.fromkeys(("B300", "GB300"), (103, 227)),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000", "RTX PRO 6000 Server"), (120, 99)),
    "GB10": (121, 99),
}
"""Of the catalogue's GPUs that Triton's kernels are compiled for: ten times the compute capability, and the KiB of
shared memory that a block may have (NVIDIA's lists)."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
OWN_SERVER, WIDTH = "foredraft", 80
ROUNDS, REQUESTS = 64, 64  # of which the accept length is the mean


@dataclass(frozen=True, slots=True)
class Part:
    """The launches of one kind in one model, on one rank. Times in microseconds."""

    name: str
    launches: int
    num_bytes: int  # moved in the GPU's memory, or sent to other ranks
    floor_us: float  # of the bytes alone, at the full bandwidth of the data sheet: of memory, or of the link
    us: float


@dataclass(frozen=True, slots=True)
class RoundEstimate:
    """A round of one cell of a benchmark with so many draft steps, on one GPU of `ranks`."""

    gpu: str
    ranks: int
    batch_size: int
    context_len: int
    steps: int
    num_nodes: int
    parts: tuple[Part, ...]
    accept_length: float | None  # tokens of a round and request; None: it is measured, not simulated

    @property
    def total(self) -> Part:
        names = ("launches", "num_bytes", "floor_us", "us")
        return Part("round", *(sum(getattr(part, name) for part in self.parts) for name in names))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all requests while every launch follows the one before at once."""
        return None if self.accept_length is None else self.batch_size * self.accept_length * 1e6 / self.total.us


def estimates(plan: BenchPlan, gpu_name: str) -> list[RoundEstimate]:
    """Return the estimates of all cells of a plan for the device "meta". Raises UnknownGPU, UnsupportedDtype, and
    ForedraftError for a GPU or a dtype without kernels here."""
    gpu = lookup_gpu(gpu_name)
    if gpu.name not in CAPABILITIES:
        raise ForedraftError(f"{gpu.name} runs none of these kernels; known are {', '.join(CAPABILITIES)}")
    dtype = str(plan.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ForedraftError(f"products are priced in 16 bits, not in {dtype}: give --dtype bfloat16")
    return [_estimate(plan, arm, cell.context_len, gpu, DTYPES[dtype]) for cell in plan.cells for arm in cell.arms]


def _estimate(plan: BenchPlan, arm: ArmPlan, context_len: int, gpu: GPU, dtype: str) -> RoundEstimate:
    capability, shared_kib = CAPABILITIES[gpu.name]
    launches = count_launches(plan, arm, context_len, DeviceTraits(gpu.sm_count, capability, shared_kib << 10))
    efficiency, ranks = default_efficiency(gpu), plan.part.size
    parts = []
    for model in (TARGET, DRAFT, ""):
        for group in GROUPS:
            mine = [launch for launch in launches if (launch.model, launch.group) == (model, group)]
            if mine:
                us = sum(launch_ns(launch, gpu, efficiency, dtype, ranks) for launch in mine) / 1e3
                name = f"{model}: {group}" if model else group
                num_bytes = sum(launch.num_bytes for launch in mine)
                link = gpu.interconnect.bandwidth_bytes_per_s
                bandwidth = link if group in EXCHANGED.values() else gpu.memory_bandwidth_bytes_per_s
                floor_us = num_bytes * 1e6 / bandwidth
                parts.append(Part(name, len(mine), num_bytes, floor_us, us))
    return RoundEstimate(
        gpu.name,
        ranks,
        arm.spec.config.max_running,
        context_len,
        arm.steps,
        arm.num_nodes,
        tuple(parts),
        accept_length(plan, arm),
    )


def launch_ns(launch: KernelLaunch, gpu: GPU, efficiency: Efficiency, dtype: str, ranks: int = 1) -> float:
    """Return the time of one launch: a product's by the roofline, another's by its bytes and a fixed cost; of an
    exchange among `ranks` GPUs, that of the simulator's all-reduce in which each sends as many bytes."""
    if launch.group in EXCHANGED.values():
        reduced = launch.num_bytes * ranks / (2 * (ranks - 1))
        return gpu.all_reduce_ns(reduced, ranks, Parallelism(ranks).nodes(ranks))
    if launch.product is not None:
        groups, rows, inner, columns = launch.product
        return efficiency.gemm_ns(
            gpu, rows, inner, columns, dtype=dtype, weight_bytes=launch.weight_bytes, groups=groups
        )
    fraction = efficiency.attention_bandwidth if launch.group == ATTENTION else efficiency.bandwidth
    return efficiency.small_kernel_ns + launch.num_bytes * 1e9 / (gpu.memory_bandwidth_bytes_per_s * fraction)


def accept_length(plan: BenchPlan, arm: ArmPlan) -> float | None:
    """Return the tokens that a round brings a request, by the plan's acceptance: 1 without drafts."""
    if not arm.steps:
        return 1.0
    process = acceptance_of_arm(plan, arm)
    if process is None:
        return None
    keys = np.array([request_key(str(number)) for number in range(REQUESTS)], np.uint64)
    return float(process.accept_lens(keys, np.ones(REQUESTS, np.int64), arm.steps, ROUNDS).mean())


def lines(plan: BenchPlan, found: Sequence[RoundEstimate]) -> list[str]:
    """Return the tables of estimates as text: a row for each part."""
    dtype = str(plan.dtype).removeprefix("torch.")
    where = found[0].gpu if found[0].ranks == 1 else f"each of {found[0].ranks} {found[0].gpu}"
    shown = [f"{plan.name}, {plan.algorithm.name}, {dtype}, on {where}: expected, not measured"]
    if plan.target.quantization is not None:
        shown.append(f"matrices of the model: {_stored(plan, dtype)}")
    for estimate in found:
        steps = f"{count_of(estimate.steps, 'step')}, {estimate.num_nodes} nodes" if estimate.steps else "plain"
        shown += ["", f"batch {estimate.batch_size}, context {estimate.context_len:,}, {steps}"]
        shown.append(f"{'part':<36}{'launches':>10}{'MB':>12}{'floor us':>10}{'us':>10}{'share':>8}")
        total = estimate.total
        for part in (*estimate.parts, total):
            name, share = f"{part.name:<36}{part.launches:>10,}", f"{part.us / total.us:>8.0%}"
            shown.append(f"{name}{part.num_bytes / 1e6:>12,.1f}{part.floor_us:>10,.0f}{part.us:>10,.0f}{share}")
        if estimate.tokens_per_s is not None:
            shown.append(f"accept length {estimate.accept_length:.2f}: {estimate.tokens_per_s:,.0f} tokens/s")
    known = evidence_of(found)
    ends = f"80 % intervals: {' to '.join(f'{end:.2f}' for end in known.interval(TPOT))} times these times"
    return [*shown, "", *textwrap.wrap(f"{ends}; they rest on {known.about}.", WIDTH)]


def evidence_of(found: Sequence[RoundEstimate]) -> Evidence:
    """Return what published points say of rounds of our executor on the GPU of these estimates."""
    return published_evidence(Place("", found[0].gpu, OWN_SERVER, "", ""), "roofline")


def _stored(plan: BenchPlan, dtype: str) -> str:
    """Say in which numbers a round reads the matrices that the configuration quantizes."""
    if not plan.target.keeps_quantized:
        return f"unpacked to {dtype}"
    target, _ = meta_models(plan.target, None, plan.dtype)
    forms = Counter(dtype if one.coded is None else one.coded.code.value for one in products_of(target))
    return ", ".join(f"{count} {form}" for form, count in forms.items())
