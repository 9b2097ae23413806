"""The rules of vLLM 0.33 (vllm/v1/core/sched/scheduler.py, async_scheduler.py, vllm/v1/core/kv_cache_manager.py).

benchmarks/schedulers compares them with vLLM's own scheduler step by step. docs/servers.md describes them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from ..life import RequestRecord
from ..waiting import least_entitled
from .admission_state import NumOutputs, PauseEnd
from .server_rules import Newcomer, Others, ServerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRules(ServerRules):
    """A newcomer finds its context. Rows take blocks as their tokens are scheduled, and give them back at once."""

    name: ClassVar[str] = "vllm"
    pause_ends: ClassVar[PauseEnd] = PauseEnd.PLAN
    pads_lone_tokens: ClassVar[bool] = True  # pad_spec_decode
    caches_at_launch: ClassVar[bool] = True  # cache_blocks
    delivers_late_tokens: ClassVar[bool] = True  # num_stale_output_tokens
    retracts_short_prompts: ClassVar[bool] = True
    has_launched_slots_alone: ClassVar[bool] = True  # num_lookahead_tokens
    frees_at_departure: ClassVar[bool] = True  # _free_request, _preempt_request
    rests_at_sure_end: ClassVar[bool] = True  # num_output_placeholders

    watermark: float = 0.0  # --watermark
    reserve_full_isl: bool = True  # --scheduler-reserve-full-isl; False: a newcomer finds its first chunk alone

    def tokens_to_find(self, newcomer: Newcomer) -> int:
        return max(newcomer.first_chunk, newcomer.context) if self.reserve_full_isl else newcomer.first_chunk

    def slots_to_leave(self, others: Others) -> int:
        return others.watermark if others.num_decoding else 0

    def victim(self, running: Collection[RequestRecord], num_outputs: NumOutputs) -> RequestRecord:
        """Choose the lowest priority, and among equals the latest arrival."""
        return least_entitled(running)
