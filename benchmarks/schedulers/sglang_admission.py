"""Which prompts SGLang's `PrefillAdder` would admit in the states in which our engine plans.

Our engine serves a workload with the profile of SGLang. Before each plan `PrefillAdder` is asked about the same waiting
and running requests, the same free slots and the same share. So one decision is compared at a time, and a difference
does not lead to others.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from foredraft.core.contract.step import Step
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.life import RequestRecord

from .our_scheduler import OurRun
from .sglang_decisions import SGLang
from .workloads import DrawnWorkload

MAX_PREFILL_TOKENS = 16_384  # --max-prefill-tokens, its default


def prepare(release: SGLang) -> Any:
    """Return the class `PrefillAdder` of the release."""
    utils = importlib.import_module("sglang.srt.utils")
    for name in ("get_bool_env_var", "is_gfx95_supported", "is_hip"):
        vars(utils)[name] = lambda *_: False
    context = importlib.import_module("sglang.srt.runtime_context")
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    vars(context)["get_exec"] = lambda: SimpleNamespace(features=features)
    vars(context)["get_context"] = lambda: SimpleNamespace(is_config_namespace_published=lambda _: False)
    pages = importlib.import_module("sglang.srt.mem_cache.allocator.page_interleave")
    vars(pages)["page_interleave_shard_size"] = lambda _: 1
    return importlib.import_module("sglang.srt.managers.schedule_policy").PrefillAdder


class _Pool:
    """The allocator and the prefix cache of SGLang, with so many free slots."""

    page_size = 1

    def __init__(self, free: int) -> None:
        self._free = free
        self._budget = importlib.import_module("sglang.srt.mem_cache.prefill_budget").PrefillBudget

    def available_size(self) -> int:
        return self._free

    def create_prefill_budget(self, cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        return self._budget(self, cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_: Any) -> int:
        return 0


_CACHE = SimpleNamespace(
    disable=False,
    evictable_size=lambda: 0,
    supports_mamba=lambda: False,
    supports_prefix_sharing=lambda: False,
    lock=lambda node: None,
    unlock=lambda lock: None,
)


def _request(record: RequestRecord, num_outputs: int, computed: int) -> SimpleNamespace:
    """Return the fields of a request that `PrefillAdder` reads."""
    length = record.prompt_len + record.emitted_before
    return SimpleNamespace(
        rid=record.request.request_id,
        sampling_params=SimpleNamespace(max_new_tokens=record.max_tokens, ignore_eos=False),
        output_ids=range(num_outputs),
        full_untruncated_fill_ids=range(length),
        prefix_len=computed,
        extend_end=0,
        host_hit_length=0,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        last_node=None,
        retracted_stain=False,
        kv=SimpleNamespace(req_pool_idx=None, holds_mamba=False),
        needs_host_load_back=lambda: False,
    )


def _asked(adder_class: Any, engine: Engine) -> list[str]:
    """Return the requests that SGLang would admit now, in order. No prompt is in progress."""
    requests, store = engine.requests, engine.store
    running = list(requests.running.values())
    held = sum(int(store.allocated[record.row]) - int(engine.rounds.kv_len[record.row]) for record in running)
    pool = _Pool(store.available_slots + held)
    batch = SimpleNamespace(reqs=[_request(each, requests.output.num_delivered(each), 0) for each in running])
    share, limit = engine.admission.room.share.now(0), engine.config.chunk_size
    adder = adder_class(1, _CACHE, pool, batch, share, MAX_PREFILL_TOKENS, limit)
    adder._commit_prefill_admission = lambda req, admission, _: _commit(adder, req, admission)
    free_rows = engine.config.max_running - len(running)
    for record in requests.waiting:
        if len(adder.can_run_list) >= free_rows:
            break
        request = _request(record, record.emitted_before, 0)
        if adder.add_one_req(request, False, None).name != "CONTINUE":
            break
    return [request.rid for request in adder.can_run_list]


def _commit(adder: Any, request: Any, admission: Any) -> None:
    adder.can_run_list.append(request)
    adder._update_prefill_budget(admission.prefix_len, admission.extend_len, admission.max_new_tokens, False)


def count_equal_admissions(adder_class: Any, workload: DrawnWorkload) -> Counter[str]:
    """Count the plans of our engine that could try a waiting request, and those in which the same requests entered."""
    plain = replace(workload, is_async=False, steps=0, caches=False)
    run = OurRun("sglang-0.5", plain, page_size=1, max_step_tokens=None)
    engine, plan, counted = run.engine, run.engine.plan, Counter[str]()

    def watched_plan(now_ns: int) -> Step | None:
        admission, requests = engine.admission, engine.requests
        may_try = requests.in_progress is None and not requests.is_admission_paused and admission.has_row
        theirs = _asked(adder_class, engine) if may_try and not admission.head_cannot_enter else None
        step = plan(now_ns)
        if theirs is not None:
            ours = [] if step is None else [join.request.request_id for join in step.joins]
            counted.update(asked=1, equal=int(ours == theirs), entered=int(bool(ours)))
        return step

    vars(engine)["plan"] = watched_plan
    for _ in run.decisions():
        pass
    return counted


def compare_admissions(release: SGLang, workloads: Iterable[DrawnWorkload]) -> list[tuple[str, str, int, int]]:
    """Return (decision, method of SGLang, plans, plans with the same answer)."""
    adder_class, counted = prepare(release), Counter[str]()
    for workload in workloads:
        counted.update(count_equal_admissions(adder_class, workload))
    refused = counted["asked"] - counted["entered"]
    decision = f"who of the waiting requests enters (in {refused:,} of these plans none)"
    return [(decision, "PrefillAdder.add_one_req", counted["asked"], counted["equal"])]
