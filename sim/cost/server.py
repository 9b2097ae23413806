"""Server profiles: what a planner cannot know of a serving engine, fitted to published measurements.

A profile bundles the host's time per step, the launch of passes, and the server whose kernels are priced. `benchmarks/fit_servers.py` fits
the launch of every profile that names a fit, from `benchmarks/published/rounds.csv`, and prints its cross-validated error; a test compares
the numbers below with a fresh fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ForetokenError, nearest_name
from .host import FORETOKEN, SGLANG_OVERLAP, VLLM_0_10, HostCost
from .launch import FULL_GRAPH, GraphUnit, LaunchCost


class UnknownServer(ForetokenError):
    """A server profile that does not exist; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The timing of one serving engine. `kernels_of`: the server whose measured kernels are priced; `about`: the fit and its error;
    `graph_unit`: what its captured sizes count."""

    name: str
    host: HostCost
    launch: LaunchCost
    kernels_of: str
    about: str
    graph_unit: GraphUnit = "rows"


_FIT = "benchmarks/fit_servers.py: least squares on benchmarks/published/rounds.csv over measured kernels"

PROFILES: dict[str, ServerProfile] = {
    profile.name: profile
    for profile in (
        ServerProfile(
            "foretoken",
            FORETOKEN,
            FULL_GRAPH,
            "sglang",
            "our own executor: every pass captured, host times as benchmarks/test_engine_round.py measures them",
        ),
        ServerProfile(
            "sglang-0.5",
            SGLANG_OVERLAP,
            LaunchCost(
                name="sglang-0.5",
                graph_gap_ns=526_000.0,
                eager_kernel_ns=5_000.0,
                draft_pass_floor_ns=0.0,
                draft_step_ns=144_000.0,
                tree_ns=745_000.0,
                source=_FIT,
            ),
            "sglang",
            "SGLang with EAGLE-3 on one H200, Llama-3.1-8B, batch 1 (33 rows, SpecBundle): draft shapes left out of the fit are met within "
            "2.9 % on average, 9.4 % at most",
        ),
        ServerProfile(
            "vllm-0.9",
            VLLM_0_10,
            LaunchCost(
                name="vllm-0.9",
                graph_gap_ns=768_000.0,
                eager_kernel_ns=5_000.0,
                draft_pass_floor_ns=0.0,
                draft_step_ns=368_000.0,
                tree_ns=0.0,
                source=_FIT,
            ),
            "vllm",
            "vLLM with EAGLE and EAGLE-3 on one H100, Llama-3.1-8B, batch 1 (13 rows, vLLM issue 20780): draft shapes left out of the fit "
            "are met within 14.0 % on average, 20.1 % at most; its two heads are driven differently",
            graph_unit="tokens",
        ),
    )
}


def server_profile(name: str) -> ServerProfile:
    """Look up the profile called `name` (case does not matter). Raises `UnknownServer`."""
    key = name.strip().lower()
    if key not in PROFILES:
        raise UnknownServer(f"unknown server {name!r}{nearest_name(key, PROFILES)}; known: {', '.join(PROFILES)}")
    return PROFILES[key]
