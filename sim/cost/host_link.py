"""Host memory behind the prefix cache: how many tokens it holds, and the time in which their KV reaches the device.

A step in which a request takes KV from host memory copies it layer by layer while the pass computes, so that each layer
waits for its own part (SGLang's hierarchical cache does this). The step ends when the last layer has both. Copies to
host memory go the other way, beside the device's work: they take no time here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.model_shape import ModelShape
from .draft import DraftShape
from .hardware import GPU, Parallelism

LATENCY_NS = 20_000
"""From the request of a copy to its first bytes: an assumption."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link from host memory to each device of a replica, and what a token's KV takes of it."""

    bytes_per_s: float
    source: str
    token_bytes: int  # of a token's KV, target and draft, on one device
    layers: int
    groups: int  # attention-data-parallel groups: each copies the KV of its own requests

    @classmethod
    def of(
        cls, gpu: GPU, parallel: Parallelism, target: ModelShape, draft: DraftShape | None, given_gbps: float | None
    ) -> HostLink:
        """Return the link of a deployment; `given_gbps` gigabits per second and device, None for the GPU's own."""
        body = None if draft is None else draft.body
        token_bytes = target.token_bytes(parallel.tensor)
        if draft is not None and body is not None:
            token_bytes += draft.heads * body.token_bytes(parallel.tensor)
        usual = gpu.host_link_bytes_per_s, gpu.sources["host_link_bytes_per_s"]
        bytes_per_s, source = usual if given_gbps is None else (given_gbps * 1e9 / 8, "scenario")
        return cls(bytes_per_s, source, token_bytes, target.layers, parallel.data)

    def num_tokens(self, num_bytes: float, tensor_parallel: int) -> int:
        """Return how many tokens `num_bytes` of host memory hold for all groups of a replica together."""
        return int(num_bytes / (self.token_bytes * tensor_parallel))

    def step_ns(self, pass_ns: int, loads: Sequence[int]) -> int:
        """Return the nanoseconds of a step whose passes take `pass_ns`, and whose requests take so many tokens each
        from host memory."""
        num_tokens = max(max(loads), sum(loads) / self.groups)
        load_ns = LATENCY_NS + num_tokens * self.token_bytes * 1e9 / self.bytes_per_s
        return max(pass_ns, int(load_ns + pass_ns / self.layers))

    def explain(self, num_tokens: int) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        return [
            ("host memory behind the prefix cache", num_tokens, "tokens", "scenario"),
            ("link from host memory to a device", self.bytes_per_s / 1e9, "GB/s", self.source),
            ("latency of a copy from host memory", LATENCY_NS / 1e3, "us", "assumption"),
        ]
