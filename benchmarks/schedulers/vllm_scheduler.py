"""vLLM's own scheduler and KV manager, from their files, on a device without a model.

The loop is that of vLLM's `EngineCore`: `step`, or `step_with_batch_queue` with two batches if scheduling is
asynchronous. Settings that a workload does not give are the release's own defaults.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foredraft.checks.servers.wheel import open_wheel, read_source
from .workloads import BLOCK, CONTEXT, STOP_TOKEN, Arrivals, Call, Decision, Device, Workload

REAL = (
    "vllm.envs",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.request",
)
ABSENT = ("cbor2", "msgspec", "xxhash", "zmq")


class Settings(SimpleNamespace):
    """A configuration: what is not given is None, which is false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _NoStats:
    """Statistics of a prompt that are not kept: a call returns None."""

    def __new__(cls) -> Any:
        return None


class VLLM:
    """An opened release of vLLM. A process can open one."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if `path` is no wheel of vLLM, and no folder of an unpacked one."""
        self.version: str = open_wheel(path, "vllm", REAL, ABSENT)
        self.defaults: dict[str, Any] = dict(_class_defaults(path, "vllm/config/scheduler.py", "SchedulerConfig"))
        utils = importlib.import_module("vllm.v1.utils")
        vars(utils)["ConstantList"] = lambda items: items
        vars(importlib.import_module("vllm.utils"))["length_from_prompt_token_ids_or_embeds"] = lambda ids, _: len(ids)
        vars(importlib.import_module("vllm.v1.metrics.stats"))["PrefillStats"] = _NoStats
        vars(importlib.import_module("vllm.multimodal.utils"))["strip_covered_mm_data"] = lambda features, *_, **__: (
            features
        )
        vars(utils)["record_function_or_nullcontext"] = lambda name: nullcontext()
        importlib.import_module("vllm.v1.core.sched.async_scheduler")
        self._modules = {name.rpartition(".")[2]: module for name, module in sys.modules.items() if name in _USED}
        self._modules["kv_cache_utils"].init_none_hash(self._hash)

    @staticmethod
    def _hash(content: Any) -> bytes:
        return hash(content).to_bytes(8, "little", signed=True)

    @property
    def aborted(self) -> Any:
        """The status of a request that its client has given up."""
        return self._modules["request"].RequestStatus.FINISHED_ABORTED

    def start(self, workload: Workload) -> VLLMRun:
        """Return a run of a workload on a fresh scheduler."""
        return VLLMRun(self, workload)

    def make_scheduler(self, workload: Workload) -> Any:
        """Make the release's scheduler with the settings of a workload."""
        interface, is_eagle = self._modules["kv_cache_interface"], workload.method == "eagle3"
        torch = importlib.import_module("torch")
        spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        num_blocks = workload.blocks + 1  # one block is the null block
        groups = [interface.KVCacheGroupSpec(["layer"], spec)]
        tables = interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        lookahead = workload.steps if is_eagle else 0
        speculation = Settings(
            num_speculative_tokens=workload.steps,
            max_num_new_slots_for_drafting=0,
            use_eagle=lambda: is_eagle,
            use_eagle_block_drop=lambda: is_eagle,
            needs_eagle_block_drop=lambda: is_eagle,
            uses_draft_model=lambda: False,
        )
        config = Settings(
            scheduler_config=Settings(
                **self.defaults
                | {
                    "max_num_seqs": workload.max_running,
                    "max_num_batched_tokens": workload.budget,
                    "enable_chunked_prefill": True,
                    "async_scheduling": workload.is_async,
                    "policy": "fcfs",
                }
            ),
            cache_config=Settings(
                block_size=BLOCK,
                num_gpu_blocks=num_blocks,
                enable_prefix_caching=workload.caches,
                mamba_cache_mode="none",
            ),
            model_config=Settings(max_model_len=CONTEXT, runner_type="generate"),
            parallel_config=Settings(
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_index=0,
            ),
            observability_config=Settings(per_request_spec_decode_metrics="none"),
            ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
            aux_output_config=Settings(enabled=False),
            speculative_config=speculation if workload.steps else None,
            num_speculative_tokens=workload.steps,
            num_lookahead_tokens=lookahead,
            num_prefill_lookahead_tokens=1 if is_eagle else 0,
            num_hash_lookahead_tokens=self.hash_lookahead(workload),
            max_concurrent_batches=2 if workload.is_async else 1,
            max_in_flight_tokens=2 * workload.budget,
            use_v2_model_runner=True,
        )
        name = "async_scheduler" if workload.is_async else "scheduler"
        kind = getattr(self._modules[name], "AsyncScheduler" if workload.is_async else "Scheduler")
        outputs = SimpleNamespace(
            accept_tokens=lambda *_: True, should_advance=lambda _: False, validate_tokens=lambda _, ids: ids
        )
        text_only = SimpleNamespace(supports_multimodal_inputs=lambda model: False)
        return kind(config, tables, outputs, block_size=BLOCK, mm_registry=text_only)

    @staticmethod
    def hash_lookahead(workload: Workload) -> int:
        """Return how many tokens behind a block its hash covers (`VllmConfig.num_hash_lookahead_tokens`)."""
        return int(workload.method == "eagle3" and workload.caches)

    def make_request(self, workload: Workload, call: Call, number: int) -> Any:
        """Make the release's request of a call."""
        make_hasher = self._modules["kv_cache_utils"].get_request_block_hasher
        lookahead = {"num_hash_lookahead_tokens": self.hash_lookahead(workload)}
        hasher = make_hasher(BLOCK, self._hash, **_known(make_hasher, lookahead))
        sampling = Settings(max_tokens=call.max_tokens, eos_token_id=STOP_TOKEN, min_tokens=0)
        structured = self._modules["request"].StructuredOutputRequest
        structured.from_sampling_params = staticmethod(lambda params: None)
        return self._modules["request"].Request(
            request_id=call.name,
            prompt_token_ids=workload.full_prompt(call.name),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(number),
            block_hasher=hasher if workload.caches else None,
        )


_USED = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.request",
)


class VLLMRun:
    """One workload on a fresh scheduler."""

    def __init__(self, release: VLLM, workload: Workload) -> None:
        self.release = release
        self.workload = workload
        self.scheduler = release.make_scheduler(workload)
        self.device = Device(workload)
        self.arrivals = Arrivals(workload)
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


def _known(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that this release knows."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(call).parameters}


def _class_defaults(path: Path, file: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a class of the release that have a literal as their default."""
    for node in ast.walk(ast.parse(read_source(path, file))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    value = field.value
                    if isinstance(value, ast.Call):
                        value = next((word.value for word in value.keywords if word.arg == "default"), None)
                    if isinstance(value, ast.Constant):
                        yield field.target.id, value.value
