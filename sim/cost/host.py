"""A server's time on the CPU: to plan, launch and commit, per step and per row, and that of its front end.

Every round pays this time. Simulators without it predict speculation 25-41 % too fast. These are amounts of work; the
driver decides whether a part hides behind the device (overlap mode) or delays it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ...core.errors import ForedraftError, nearest, nearest_name
from .draft import EAGLE3


class UnknownHostPreset(ForedraftError):
    """A host preset that does not exist; the message lists the known ones."""


Nanoseconds = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class HostCost:
    """CPU time of one step in integer nanoseconds: a base, a share per row, a share per emitted token.

    `plan`: schedule and allocate; `launch`: build the inputs and launch the graphs; `commit`: read results, accept,
    finish; `detokenise`: turn tokens into text where this happens on the scheduler's thread. `verify`: more of a
    commit after a round with drafts, where the engine is synchronous and the host reads what was accepted: a base and a
    share per row.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    source: str
    plan_base_ns: Nanoseconds
    launch_base_ns: Nanoseconds
    commit_base_ns: Nanoseconds
    plan_row_ns: Nanoseconds = 0
    launch_row_ns: Nanoseconds = 0
    commit_row_ns: Nanoseconds = 0
    commit_token_ns: Nanoseconds = 0
    sampling_base_ns: Nanoseconds = 0
    sampling_row_ns: Nanoseconds = 0
    detokenise_token_ns: Nanoseconds = 0
    verify_base_ns: Nanoseconds = 0
    verify_row_ns: Nanoseconds = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_ns"):
                assert isinstance(value, int), f"{name} must be an integer number of nanoseconds, not {value!r}"
                assert value >= 0, f"{name} is negative"

    def plan_ns(self, batch_size: int) -> int:
        """Return the time to schedule a step with `batch_size` rows."""
        return self.plan_base_ns + self.plan_row_ns * batch_size

    def launch_ns(self, batch_size: int) -> int:
        """Return the time for inputs, sampling parameters and launch of a step with `batch_size` rows."""
        rows_ns = (self.launch_row_ns + self.sampling_row_ns) * batch_size
        return self.launch_base_ns + self.sampling_base_ns + rows_ns

    def late_ns(self, batch_size: int, has_look_ups: bool) -> int:
        """Return the time of a round in which the device waits although it overlaps with the host: look-ups need the
        tokens of the round before, so nothing runs while their round is launched. 0 for other drafts."""
        return self.launch_ns(batch_size) if has_look_ups else 0

    def commit_ns(self, batch_size: int, tokens: int, verified_rows: int = 0) -> int:
        """Return the time to process a step's results: `tokens` emitted over `batch_size` rows. `verified_rows`: the
        rows with drafts, of a synchronous engine alone."""
        per_token = self.commit_token_ns + self.detokenise_token_ns
        rows_ns = self.commit_row_ns * batch_size
        if verified_rows:
            rows_ns += self.verify_base_ns + self.verify_row_ns * verified_rows
        return self.commit_base_ns + rows_ns + per_token * tokens

    def round_ns(self, batch_size: int, tokens: int, verified_rows: int = 0) -> int:
        """Return the sum of all three, because a synchronous engine pays them one after the other."""
        before_ns = self.plan_ns(batch_size) + self.launch_ns(batch_size)
        return before_ns + self.commit_ns(batch_size, tokens, verified_rows)

    def shared_by(self, groups: int) -> HostCost:
        """Return the cost where each of `groups` attention-data parallel groups has a scheduler for its own rows."""
        if groups == 1:
            return self
        times = {
            name: round(getattr(self, name) / groups)
            for name in self.__slots__
            if name.endswith(("_row_ns", "_token_ns"))
        }
        return replace(self, **times)

    def at_pace(self, pace: float) -> HostCost:
        """Return the cost on the same machine if everything takes `pace` times as long."""
        times = {name: round(getattr(self, name) * pace) for name in self.__slots__ if name.endswith("_ns")}
        return replace(self, **times)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        times = {
            "plan": self.plan_base_ns,
            "plan per row": self.plan_row_ns,
            "launch": self.launch_base_ns + self.sampling_base_ns,
            "launch per row": self.launch_row_ns + self.sampling_row_ns,
            "commit": self.commit_base_ns,
            "commit per row": self.commit_row_ns,
            "commit per token": self.commit_token_ns + self.detokenise_token_ns,
        }
        if self.verify_row_ns:
            times["commit with drafts, synchronous"] = self.verify_base_ns
            times["commit per row with drafts, synchronous"] = self.verify_row_ns
        return [(f"host {self.name}: {what}", ns / 1e3, "us", self.source) for what, ns in times.items()]


VLLM_0_10 = HostCost(
    name="vllm-0.10",
    plan_base_ns=300_000,
    launch_base_ns=450_000,
    commit_base_ns=357_000,
    sampling_base_ns=100_000,
    source="arXiv 2601.11580: 1.207 ms per step besides draft and target, without a share per row; "
    "assumption: how it divides among plan, launch, sampling and commit",
)

SGLANG_OVERLAP = HostCost(
    name="sglang-overlap",
    plan_base_ns=200_000,
    plan_row_ns=2_000,
    launch_base_ns=350_000,
    launch_row_ns=1_000,
    commit_base_ns=150_000,
    commit_row_ns=5_000,
    commit_token_ns=500,
    sampling_base_ns=50_000,
    sampling_row_ns=500,
    verify_base_ns=1_181_000,
    verify_row_ns=53_000,
    source="assumption: a Python scheduler that runs ahead of the device; text is made in another process; commits with "
    "drafts of a synchronous engine: benchmarks/fit_servers.py, speed-ups of SGLang 0.4.4 with 2 to 48 clients",
)

FOREDRAFT = HostCost(
    name="foredraft",
    plan_base_ns=20_000,
    plan_row_ns=100,
    launch_base_ns=120_000,
    launch_row_ns=100,
    commit_base_ns=20_000,
    commit_row_ns=200,
    commit_token_ns=100,
    sampling_base_ns=10_000,
    sampling_row_ns=50,
    detokenise_token_ns=2_000,
    source="plan and commit: as benchmarks/timing/test_engine_round.py measures them (docs/evidence/benchmarks.md); "
    "assumption: launch, a few graph launches and one copy each way",
)

HOST_PRESETS: dict[str, HostCost] = {preset.name: preset for preset in (VLLM_0_10, SGLANG_OVERLAP, FOREDRAFT)}


def host_preset(name: str) -> HostCost:
    """Look up the preset called `name` (case does not matter). Raises `UnknownHostPreset`."""
    key = name.strip().lower()
    if key not in HOST_PRESETS:
        known = ", ".join(HOST_PRESETS)
        raise UnknownHostPreset(f"unknown host preset {name!r}{nearest_name(key, HOST_PRESETS)}; known: {known}")
    return HOST_PRESETS[key]


def whole_round_ns(device_ns: int, host_ns: int, is_overlapped: bool, late_ns: int = 0) -> int:
    """Return the time from one round to the next. `late_ns`: what `HostCost.late_ns` returns, a part of `host_ns`."""
    return late_ns + max(device_ns, host_ns - late_ns) if is_overlapped else device_ns + host_ns


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """The processes of a server around its scheduler. Each serves one request, or one chunk of output, after the other.

    `poll_steps`: decode steps between two looks of the scheduler at its queue (SGLang's --scheduler-recv-interval).
    `stream_interval`: output tokens of a chunk that is sent to a client. `first_chunk`: "token", the first token is
    sent alone; "interval", it waits for its chunk.
    """

    request_ns: int = 0
    token_ns: int = 0  # per prompt token
    poll_steps: int = 1
    stream_interval: int = 1
    first_chunk: str = "token"
    chunk_ns: int = 0  # of the output process, per chunk
    output_token_ns: int = 0  # of the output process, per token

    @property
    def delays(self) -> bool:
        """Whether a request may reach the scheduler later than the server."""
        return bool(self.request_ns or self.token_ns or self.poll_steps > 1)

    @property
    def streams_late(self) -> bool:
        """Whether a token may reach its client later than its round ends."""
        return bool(self.stream_interval > 1 or self.chunk_ns or self.output_token_ns)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`; none if nothing is delayed."""
        rows: list[tuple[str, float, str, str]] = []
        if self.delays:
            rows += [
                ("front end: per request", self.request_ns / 1e3, "us", "front_end.request_us"),
                ("front end: per prompt token", self.token_ns / 1e3, "us", "front_end.prompt_token_us"),
                ("front end: scheduler looks every", self.poll_steps, "decode steps", "front_end.poll_steps"),
            ]
        if self.streams_late:
            rows += [
                ("front end: output in chunks of", self.stream_interval, "tokens", "front_end.stream_interval"),
                ("front end: per chunk of output", self.chunk_ns / 1e3, "us", "front_end.chunk_us"),
                ("front end: per output token", self.output_token_ns / 1e3, "us", "front_end.output_token_us"),
            ]
        return rows


NO_DELAY = FrontEnd()
"""A front end that takes no time, and a scheduler that looks at its queue before every plan."""


GraphUnit = Literal["rows", "tokens"]
"""The unit of captured sizes: rows of a batch (SGLang, and our executor), or tokens of a pass (vLLM)."""


class UnknownPreset(ForedraftError):
    """A preset name that does not exist; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Launch behaviour of an engine: whole passes as captured graphs, or kernel by kernel from the host. Times in
    nanoseconds.

    A captured pass costs a short gap on the device. A pass that is dispatched kernel by kernel cannot run faster than
    the host launches it. So kernels × time per launch is a *floor* of its time, not an addition.
    """

    name: str
    graph_gap_ns: float  # device idle between two captured passes
    eager_kernel_ns: float  # host time to launch one kernel
    draft_pass_floor_ns: float  # least time of a drafting pass that the host drives; 0: the drafting loop is captured
    source: str
    draft_step_ns: float = 0.0  # fixed time per draft step: top-k, gathering, small kernels
    tree_ns: float = 0.0  # fixed time per round that drafts a tree
    row_gap_ns: float = 0.0  # device idle per request of a step: sampling parameters, inputs, finished requests
    eagle3_step_ns: float = 0.0  # more per step of EAGLE-3, where the server captures the other heads alone
    # More per collective and doubling of its devices: they wait for the slowest. A database times collectives that
    # start together.
    collective_gap_ns: float = 0.0
    # The same as eager_kernel_ns for a decode pass of sparse attention beyond the graphs, whose indexers Python drives.
    eager_index_ns: float = 0.0
    # Whether the pass that keeps the draft's KV in a round without drafts computes logits for the next round.
    has_resting_logits: bool = True
    piece_gap_ns: float = (
        0.0  # device idle before and after each layer's attention, where graphs are captured in pieces
    )

    def in_pieces(self) -> LaunchCost:
        """Return the launch of passes that are captured in pieces, between which each layer's attention is launched."""
        return replace(self, piece_gap_ns=PIECE_GAP_NS)

    def pieces_gap_ns(self, layers: int) -> float:
        """Return the idle time of the device within a captured pass of so many layers."""
        return 2 * layers * self.piece_gap_ns

    def step_ns(self, algorithm: str) -> float:
        """Return the fixed time of a draft step of `algorithm`."""
        return self.draft_step_ns + (self.eagle3_step_ns if algorithm == EAGLE3 else 0.0)

    def target_gap_ns(self, rows: float) -> float:
        """Return the idle time of the device before a pass of the target over `rows` requests."""
        return self.graph_gap_ns + self.row_gap_ns * rows

    def collectives_gap_ns(self, count: int, devices: int) -> float:
        """Return the time that `count` collectives over `devices` take beyond the database's time; among 2ⁿ devices n
        pairs wait."""
        return self.collective_gap_ns * count * math.log2(devices)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        times = {
            "gap between captured passes": self.graph_gap_ns,
            "gap per request of a step": self.row_gap_ns,
            "wait per collective and doubling of devices": self.collective_gap_ns,
            "one kernel from the host": self.eager_kernel_ns,
            "one kernel of a decode pass with sparse attention beyond the graphs": self.eager_index_ns,
            "least time of a drafting pass": self.draft_pass_floor_ns,
            "a draft step besides its pass": self.draft_step_ns,
            "a step of EAGLE-3 besides that": self.eagle3_step_ns,
            "a tree besides its passes": self.tree_ns,
        }
        if self.piece_gap_ns:
            times["gap between pieces of a pass"] = self.piece_gap_ns
        return [(f"launch {self.name}: {what}", ns / 1e3, "us", self.source) for what, ns in times.items()]


PIECE_GAP_NS = 5_000.0
"""Assumption: as between two captured passes of FULL_GRAPH. In vLLM issue 49548 a round of a model of 60 layers takes
0.95 ms more with a schedule that never drafts. These gaps are 0.6 ms of it, and the rest is the pass that keeps the
draft's KV."""

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
        message = f"unknown launch preset {name!r}{nearest(name, LAUNCH_PRESETS)}; known: {', '.join(LAUNCH_PRESETS)}"
        raise UnknownPreset(message)
    return LAUNCH_PRESETS[name]
