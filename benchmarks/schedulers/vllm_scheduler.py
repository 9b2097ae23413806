"""vLLM's own scheduler and KV manager, from their files, on a device without a model.

The loop is that of vLLM's `EngineCore`: `step`, or `step_with_batch_queue` with two batches if scheduling is
asynchronous. Settings that a workload does not give are the release's own defaults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foredraft.checks.servers.release import name_wheel
from foredraft.checks.servers.vllm import (
    SchedulerSettings,
    Settings,
    make_request,
    make_scheduler,
    module_of,
    open_vllm,
)

from .workloads import BLOCK, CONTEXT, STOP_TOKEN, Decision, Device, DrawnArrivals, DrawnCall, DrawnWorkload


class VLLM:
    """An opened release of vLLM. A process can open one."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if `path` is no wheel of vLLM, and no folder of an unpacked one."""
        name_wheel("vllm", path)
        self.version: str = open_vllm(any_release=True).version

    @property
    def aborted(self) -> Any:
        """The status of a request that its client has given up."""
        return module_of("request").RequestStatus.FINISHED_ABORTED

    def start(self, workload: DrawnWorkload) -> VLLMRun:
        """Return a run of a workload on a fresh scheduler."""
        return VLLMRun(self, workload)

    def make_scheduler(self, workload: DrawnWorkload) -> Any:
        """Make the release's scheduler with the settings of a workload."""
        return make_scheduler(settings_of(workload))

    def make_request(self, workload: DrawnWorkload, call: DrawnCall, number: int) -> Any:
        """Make the release's request of a call."""
        return make_request(
            call.name,
            workload.full_prompt(call.name),
            BLOCK,
            max_tokens=call.max_tokens,
            eos_token=STOP_TOKEN,
            caches=workload.caches,
            hash_lookahead=settings_of(workload).hash_lookahead,
            arrival_time=float(number),
        )


def settings_of(workload: DrawnWorkload) -> SchedulerSettings:
    """Return the settings of the release's scheduler for a workload."""
    return SchedulerSettings(
        num_blocks=workload.blocks,
        block_size=BLOCK,
        max_running=workload.max_running,
        budget=workload.budget,
        context_len=CONTEXT,
        steps=workload.steps,
        is_eagle=workload.method == "eagle3",
        is_async=workload.is_async,
        caches=workload.caches,
    )


class VLLMRun:
    """One workload on a fresh scheduler."""

    def __init__(self, release: VLLM, workload: DrawnWorkload) -> None:
        self.release = release
        self.workload = workload
        self.scheduler = release.make_scheduler(workload)
        self.device = Device(workload)
        self.arrivals = DrawnArrivals(workload)
        self.num_arrived = 0
        self.notes: set[str] = set()
        self.prompt_end: dict[str, int] = {}  # where the prefill of a request ends, since it last entered

    def decisions(self) -> Iterator[Decision]:
        """Run the loop of `EngineCore` until no request is left."""
        depth = 2 if self.workload.is_async else 1
        queue: deque[tuple[Any, Any]] = deque()
        plan = 0
        while not self.arrivals.is_over or self.scheduler.requests:
            for call in self.arrivals.before_plan(plan):
                self.scheduler.add_request(self.release.make_request(self.workload, call, self.num_arrived))
                self.num_arrived += 1
            for name in self.arrivals.given_up():
                self.scheduler.finish_requests(name, self.release.aborted)
                self.arrivals.end(name)
            before = {name: request.num_computed_tokens for name, request in self.scheduler.requests.items()}
            output = self.scheduler.schedule()
            self._look_for_copies()
            yield self._decision(output, before)
            queue.append((output, self._execute(output, before)))
            plan += 1
            if len(queue) == depth:
                self._update(*queue.popleft())

    def _look_for_copies(self) -> None:
        cached = vars(self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block).get("_cache", {})
        if any(isinstance(blocks, dict) and len(blocks) > 1 for blocks in cached.values()):
            self.notes.add("a block was cached twice")

    def _decision(self, output: Any, before: dict[str, int]) -> Decision:
        prefill, decode, cached = [], [], []
        entered = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        others = output.scheduled_cached_reqs
        for name, num_computed in zip(others.req_ids, others.num_computed_tokens, strict=True):
            if name in others.resumed_req_ids:
                entered[name] = num_computed
        for name, count in output.num_scheduled_tokens.items():
            if name in entered:
                self.prompt_end[name] = self.scheduler.requests[name].num_tokens
                before[name] = entered[name]
                cached.append((name, entered[name]))
            is_prompt = before[name] < self.prompt_end[name]
            (prefill if is_prompt else decode).append((name, count))
        pool = self.scheduler.kv_cache_manager.block_pool
        in_use = self.workload.blocks - pool.get_num_free_blocks()
        preempted = tuple(sorted(output.preempted_req_ids))
        return Decision(tuple(prefill), tuple(decode), preempted, tuple(cached), in_use)

    def _execute(self, output: Any, before: dict[str, int]) -> dict[str, list[int]]:
        """Return the tokens that each request of a step samples; none in the middle of a prompt."""
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            end = before[name] + count - drafts
            if before[name] >= self.prompt_end[name]:
                sampled[name] = self.device.verify(name, drafts)
            elif end >= self.prompt_end[name]:
                emitted = self.prompt_end[name] - len(self.workload.full_prompt(name))
                sampled[name] = [self.device.end_prompt(name, emitted)]
            else:
                sampled[name] = []
        return sampled

    def _update(self, output: Any, sampled: dict[str, list[int]]) -> None:
        names = list(sampled)
        result = Settings(
            sampled_token_ids=[list(sampled[name]) for name in names],
            req_id_to_index={name: index for index, name in enumerate(names)},
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
        )
        live = set(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        if self.workload.steps and not self.workload.is_async:
            names = [name for name in names if name in self.scheduler.requests]
            drafts = [[0] * self.workload.steps for _ in names]
            self.scheduler.update_draft_token_ids(SimpleNamespace(req_ids=names, draft_token_ids=drafts))
        for name in sorted(live - set(self.scheduler.requests)):
            self.arrivals.end(name)
