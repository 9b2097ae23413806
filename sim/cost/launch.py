"""The launch of kernels: whole passes as captured graphs, or kernel by kernel from the host.

A captured pass costs a short gap on the device. A pass that is dispatched kernel by kernel cannot run faster than the
host launches it: its time is at least (kernels × time per launch), a *floor*, not an addition.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from ...core.errors import ForetokenError, nearest
from .draft import EAGLE3

GraphUnit = Literal["rows", "tokens"]
"""What captured sizes count: rows of a batch (SGLang, and our executor), or tokens of a pass (vLLM)."""


class UnknownPreset(ForetokenError):
    """A preset name that does not exist; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Launch behaviour of an engine. Times in nanoseconds.

    `graph_gap_ns`: device idle between two captured passes; `row_gap_ns`: the same per request of a step, for what the host does for each
    while the device waits (sampling parameters, inputs, finished requests); `eager_kernel_ns`: host time to launch one kernel;
    `draft_pass_floor_ns`: least time of one drafting pass where the drafting loop is driven by the host (0: it is
    captured); `draft_step_ns`: fixed time per draft step (top-k, gathering, small kernels); `tree_ns`: fixed time per
    round that drafts a tree; `eagle3_step_ns`: more per step of an EAGLE-3 head, where the server captures the other heads alone;
    `collective_gap_ns`: more per collective of a pass and doubling of its devices, which wait for the slowest of them; a database has
    the time of collectives that start together.
    """

    name: str
    graph_gap_ns: float
    eager_kernel_ns: float
    draft_pass_floor_ns: float
    source: str
    draft_step_ns: float = 0.0
    tree_ns: float = 0.0
    row_gap_ns: float = 0.0
    eagle3_step_ns: float = 0.0
    collective_gap_ns: float = 0.0

    def step_ns(self, algorithm: str) -> float:
        """Return the fixed time of a draft step of `algorithm`."""
        return self.draft_step_ns + (self.eagle3_step_ns if algorithm == EAGLE3 else 0.0)

    def target_gap_ns(self, rows: int) -> float:
        """Return the idle time of the device before a pass of the target over `rows` requests."""
        return self.graph_gap_ns + self.row_gap_ns * rows

    def collectives_gap_ns(self, count: int, devices: int) -> float:
        """Return what so many collectives over `devices` take more than the database has of them: among 2ⁿ devices n pairs wait."""
        return self.collective_gap_ns * count * math.log2(devices)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        times = {
            "gap between captured passes": self.graph_gap_ns,
            "gap per request of a step": self.row_gap_ns,
            "wait per collective and doubling of devices": self.collective_gap_ns,
            "one kernel from the host": self.eager_kernel_ns,
            "least time of a drafting pass": self.draft_pass_floor_ns,
            "a draft step besides its pass": self.draft_step_ns,
            "a step of EAGLE-3 besides that": self.eagle3_step_ns,
            "a tree besides its passes": self.tree_ns,
        }
        return [(f"launch {self.name}: {what}", ns / 1e3, "us", self.source) for what, ns in times.items()]


FULL_GRAPH = LaunchCost(
    name="full-graph",
    graph_gap_ns=5_000.0,
    eager_kernel_ns=5_000.0,
    draft_pass_floor_ns=0.0,
    source="assumption: draft, verify and catch-up are captured; 5 us between graphs, 5 us per launch without one",
)

PIECEWISE = LaunchCost(
    name="piecewise",
    graph_gap_ns=5_000.0,
    eager_kernel_ns=5_000.0,
    draft_pass_floor_ns=712_000.0,
    source="arXiv 2601.11580 (vLLM 0.10.1): 2.135 ms for 3 EAGLE passes; the host drives each of them",
)

LAUNCH_PRESETS: dict[str, LaunchCost] = {preset.name: preset for preset in (FULL_GRAPH, PIECEWISE)}


def launch_preset(name: str) -> LaunchCost:
    """Look up the preset called `name`. Raises `UnknownPreset`."""
    if name not in LAUNCH_PRESETS:
        raise UnknownPreset(
            f"unknown launch preset {name!r}{nearest(name, LAUNCH_PRESETS)}; known: {', '.join(LAUNCH_PRESETS)}"
        )
    return LAUNCH_PRESETS[name]


def padded_tokens(
    batch_size: int, width: int, graph_sizes: tuple[int, ...] | None, unit: GraphUnit = "rows"
) -> int | None:
    """Return the tokens that the captured graph of a pass with `width` tokens per row computes.

    None where no graph does (the pass is too large, or graphs are off). `graph_sizes` must be in increasing order.
    """
    size = batch_size if unit == "rows" else batch_size * width
    if not graph_sizes or size > graph_sizes[-1]:
        return None
    captured = graph_sizes[bisect_left(graph_sizes, size)]
    return captured * width if unit == "rows" else captured
