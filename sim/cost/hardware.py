"""The catalogue of GPUs: peaks from data sheets, each with its source. `efficiency.py` has the fractions that kernels
reach.

All rates are dense (no structured sparsity), per device, and per direction for links. Memory is what the driver
reports, which an engine can use.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...core.errors import ForedraftError, nearest_name

MIB, GIB = 1 << 20, 1 << 30


class UnknownGPU(ForedraftError):
    """A GPU name that is not in the catalogue; the message lists the known ones and the nearest."""


class UnsupportedParallelism(ForedraftError):
    """A number of devices that does not divide the model, or ways of dividing it that contradict each other."""


class UnsupportedDtype(ForedraftError):
    """A data type for which this GPU has no tensor-core rate."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The link between the GPUs of one tensor-parallel group.

    `bandwidth_bytes_per_s` is per GPU and per direction; `latency_ns` is the fixed part of one small all-reduce.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_ns: int


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the devices of one engine share a model.

    `tensor` devices share each layer. `data` such groups (attention-data parallelism) have requests of their own. They
    share the routed experts: all `tensor · data` devices hold them, in `expert` ranks of whole experts.
    `gpus_per_node`: devices that the fast link joins.
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if min(self.tensor, self.data, self.expert, self.gpus_per_node) < 1:
            raise UnsupportedParallelism(f"{self}: every number of devices must be at least 1")
        if self.devices % self.expert:
            raise UnsupportedParallelism(
                f"expert parallelism {self.expert} does not divide the {self.devices} devices of an engine (tensor parallelism "
                f"{self.tensor} × attention-data parallelism {self.data})"
            )

    @classmethod
    def of(cls, devices: int | Parallelism) -> Parallelism:
        """Return tensor parallelism over so many devices, or the given parallelism as it is."""
        return devices if isinstance(devices, Parallelism) else cls(devices)

    @property
    def devices(self) -> int:
        return self.tensor * self.data

    @property
    def without_experts(self) -> Parallelism:
        """The same devices, for a draft: without ranks of experts."""
        return replace(self, expert=1)

    def nodes(self, devices: int) -> int:
        """Return over how many nodes so many neighbouring devices spread."""
        return -(-devices // self.gpus_per_node)

    def __str__(self) -> str:
        parts = {"expert parallel": self.expert, "attention-data parallel": self.data}
        return ", ".join([f"tensor parallel {self.tensor}", *(f"{name} {n}" for name, n in parts.items() if n > 1)])


@dataclass(frozen=True, slots=True)
class GPU:
    """One device. `peak_flops` maps a data type ("bf16", "fp16", "fp8") to FLOP/s; `per_node`: devices that the
    interconnect joins; `sources` maps a field to its source."""

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    sm_count: int
    interconnect: Interconnect
    network: Interconnect
    per_node: int
    host_link_bytes_per_s: float  # from host memory to the device
    power_w: float | None  # of the board; None: not given
    sources: Mapping[str, str] = field(hash=False, repr=False, compare=False)

    def flops(self, dtype: str) -> float:
        """Return peak dense FLOP/s for `dtype`. Raises `UnsupportedDtype` where the device has no such rate."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise UnsupportedDtype(f"{self.name} has no tensor-core rate for {dtype!r}; it has {known}")
        return self.peak_flops[dtype]

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        name, of, link, network = self.name, self.sources, self.interconnect, self.network
        link_rate, network_rate = link.bandwidth_bytes_per_s / 1e9, network.bandwidth_bytes_per_s / 1e9
        bandwidth = self.memory_bandwidth_bytes_per_s / 1e9
        return [
            *(
                (f"{name} peak {dtype}", rate / 1e12, "TFLOP/s", of["peak_flops"])
                for dtype, rate in self.peak_flops.items()
            ),
            (f"{name} memory", self.memory_bytes / 1e9, "GB", of["memory_bytes"]),
            (f"{name} memory bandwidth", bandwidth, "GB/s", of["memory_bandwidth_bytes_per_s"]),
            (f"{name} multiprocessors", self.sm_count, "", of["sm_count"]),
            (f"{name} {link.name} bandwidth per direction", link_rate, "GB/s", of["interconnect"]),
            (f"{name} all-reduce latency", link.latency_ns / 1e3, "us", of["interconnect_latency"]),
            (f"{name} bandwidth between nodes, per direction", network_rate, "GB/s", of["network"]),
            (f"{name} latency between nodes", network.latency_ns / 1e3, "us", _NETWORK_LATENCY),
            *([] if self.power_w is None else [(f"{name} power", self.power_w, "W", of["power_w"])]),
        ]

    def all_reduce_ns(self, size_bytes: float, devices: int, nodes: int = 1) -> float:
        """Return the time of an all-reduce of `size_bytes` over `devices`, in equal parts on `nodes`; of an all-gather
        with the reduce-scatter that ends it, too.

        Inside a node each device sends and receives 2·(g − 1)/g of the bytes, after a fixed latency. Between m nodes
        each of the g devices of a node exchanges 1/g of the bytes with the devices in its place in the other nodes:
        2·(m − 1)/m of them over its own port.
        """
        if devices == 1:
            return 0.0
        link, local = self.interconnect, -(-devices // nodes)
        time_ns = link.latency_ns + 2 * (local - 1) / local * size_bytes * 1e9 / link.bandwidth_bytes_per_s
        if nodes > 1:
            share = 2 * (nodes - 1) / nodes * size_bytes / local
            time_ns += self.network.latency_ns + share * 1e9 / self.network.bandwidth_bytes_per_s
        return time_ns


_NVLINK_LATENCY = "assumption: one-shot all-reduce over NVLink with NVSwitch takes 7 us for a few KiB"
_XGMI_LATENCY = "assumption: all-reduce over point-to-point Infinity Fabric takes 12 us for a few KiB"
_PCIE_LATENCY = "assumption: all-reduce over PCIe takes 25 us for a few KiB"
_NETWORK_LATENCY = "assumption: a small all-reduce takes 20 us more over InfiniBand or RoCE between nodes"
_DATABASE = "system description of the package aiconfigurator-core 0.12"
_DGX = {
    "A100": (25.0, "DGX A100 data sheet: a 200 Gb/s ConnectX-6 port for each GPU"),
    "Hopper": (50.0, "DGX H100/H200 data sheet: a 400 Gb/s ConnectX-7 port for each GPU"),
    "B200": (50.0, "DGX B200 data sheet: a 400 Gb/s ConnectX-7 port for each GPU"),
    "PCIe": (25.0, "assumption: a 200 Gb/s port for each GPU"),
    "Instinct": (50.0, "assumption: a 400 Gb/s port for each GPU, as 8-GPU platforms have"),
    "Spark": (25.0, "NVIDIA DGX Spark data sheet: ConnectX-7 at 200 Gb/s"),
    "Ultra": (100.0, f"{_DATABASE}: an 800 Gb/s ConnectX-8 port for each GPU"),
}  # gigabytes per second and direction between nodes
_HOST_LINKS = {
    "PCIe 4": (25e9, "assumption: four fifths of PCIe 4 x16"),
    "PCIe 5": (50e9, "assumption: four fifths of PCIe 5 x16"),
    "C2C": (360e9, "assumption: four fifths of NVLink-C2C, 450 GB/s per direction"),
    "unified": (
        109e9,
        "assumption: four fifths of half the memory bandwidth, since a copy reads and writes one memory",
    ),
}
_LATENCIES = {
    "NVLink": (7_000, _NVLINK_LATENCY),
    "Infinity Fabric": (12_000, _XGMI_LATENCY),
    "PCIe": (25_000, _PCIE_LATENCY),
    "ConnectX": (25_000, "assumption: as over PCIe"),
}
_REPORTED = "memory.total as the driver reports it"
_USUAL_SMS = 128
_SIXTEEN_BITS = ("bf16", "fp16")


def _read_gpu(row: Mapping[str, str]) -> GPU:
    """Return the GPU of a row of `gpus.csv`: its rates are dense, in TFLOP/s of 16, 8 and 4 bits."""
    sheet, latency = row["sheet"], _LATENCIES[row["link"].rstrip("0123456789. ")]
    formats = (*_SIXTEEN_BITS, "fp8", row["four_bits"])
    rates = zip(formats, (row[f"tflops_{bits}"] for bits in (16, 16, 8, 4)), strict=True)
    (network, network_source), (host_link, host_source) = _DGX[row["ports"]], _HOST_LINKS[row["host_link"]]
    per_node = int(row["per_node"])
    return GPU(
        name=row["name"],
        peak_flops={dtype: float(rate) * 1e12 for dtype, rate in rates if rate},
        memory_bytes=int(row["mebibytes"]) * MIB,
        memory_bandwidth_bytes_per_s=float(row["gigabytes_per_s"]) * 1e9,
        sm_count=int(row["multiprocessors"]),
        interconnect=Interconnect(row["link"], float(row["link_gigabytes_per_s"]) * 1e9, latency[0]),
        network=Interconnect("network", network * 1e9, 20_000),
        per_node=per_node,
        host_link_bytes_per_s=host_link,
        power_w=int(row["watts"]),
        sources={
            "peak_flops": f"{sheet}, dense {row['peak_note']}".replace(" :", ":").strip(),
            "memory_bytes": f"{row['memory_note'] or _REPORTED} ({row['mebibytes']} MiB)",
            "memory_bandwidth_bytes_per_s": sheet,
            "sm_count": "assumption: as many as B200" if sheet == _DATABASE else sheet,
            "interconnect": f"{sheet}: half of the bidirectional total",
            "interconnect_latency": latency[1],
            "network": network_source,
            "host_link_bytes_per_s": host_source,
            "per_node": "eight GPUs are the usual node" if per_node == 8 else sheet,
            "power_w": f"{sheet}: maximum of a board",
        },
    )


_OTHERS = {
    "a10g", "a30", "a40", "a800", "v100", "t4", "l2", "b100", "gh200", "h100nvl", "h100pcie", "rtx3080", "rtx4080",
    "rtx5080", "a6000", "rtxa6000", "rtx5000ada", "rtxpro5000", "mi250x", "mi300a", "mi308x", "mi350x",
}  # fmt: skip
"""GPUs that exist and are not in the catalogue. No entry of the catalogue may be used in their place."""


def _key(name: str) -> str:
    """Return a name without case, blanks and punctuation: "RTX-4090", "rtx 4090" and "rtx4090" are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


with Path(__file__).with_name("gpus.csv").open(newline="", encoding="utf-8") as _file:
    _ROWS = [(row, _read_gpu(row)) for row in csv.DictReader(_file)]

_BY_KEY: dict[str, GPU] = {key: gpu for row, gpu in _ROWS for key in (_key(gpu.name), *row["also"].split())}


def known_gpus() -> tuple[str, ...]:
    """Return the names in the catalogue, in its order."""
    return tuple(gpu.name for _, gpu in _ROWS)


CUSTOM = "custom"
"""The name of a GPU whose numbers the user gives (`hardware.custom`). No entry of the catalogue has it, and so no
published or measured point."""
_GIVEN = "hardware.custom"


def custom_gpu(
    memory_gb: float,
    bandwidth_gb_per_s: float,
    tflops: Mapping[str, float],
    link_gb_per_s: float,
    power_w: float | None = None,
    multiprocessors: int | None = None,
) -> GPU:
    """Return the GPU of these numbers, in the units of data sheets. `tflops`: dense, by data type. `link_gb_per_s`: to
    another GPU of the node, per direction. What is not asked for is assumed as for a card on PCIe."""
    latency_ns, latency = _LATENCIES["PCIe"]
    (network, network_source), (host_link, host_source) = _DGX["PCIe"], _HOST_LINKS["PCIe 4"]
    return GPU(
        name=CUSTOM,
        peak_flops={dtype: rate * 1e12 for dtype, rate in tflops.items()},
        memory_bytes=round(memory_gb * 1e9),
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        sm_count=_USUAL_SMS if multiprocessors is None else multiprocessors,
        interconnect=Interconnect("link", link_gb_per_s * 1e9, latency_ns),
        network=Interconnect("network", network * 1e9, 20_000),
        per_node=8,
        host_link_bytes_per_s=host_link,
        power_w=power_w,
        sources=dict.fromkeys(("peak_flops", "memory_bytes", "memory_bandwidth_bytes_per_s", "interconnect"), _GIVEN)
        | {
            "sm_count": f"assumption: {_USUAL_SMS}, as large GPUs have" if multiprocessors is None else _GIVEN,
            "interconnect_latency": latency,
            "network": network_source,
            "host_link_bytes_per_s": host_source,
            "per_node": "eight GPUs are the usual node",
            "power_w": _GIVEN,
        },
    )


def lookup_gpu(name: str) -> GPU:
    """Look up the GPU called `name` (case, blanks and punctuation do not matter; a leading "NVIDIA" or "AMD" is
    ignored).

    Raises `UnknownGPU` with the nearest known name.
    """
    key = re.sub(r"^(nvidia|amd|geforce|instinct)+", "", _key(name))
    if key not in _BY_KEY:
        hint = "" if key in _OTHERS else nearest_name(name.upper(), known_gpus())
        known = ", ".join(known_gpus())
        raise UnknownGPU(f"unknown GPU {name!r}{hint}; known: {known}; hardware.custom takes the numbers of another")
    return _BY_KEY[key]
