"""vLLM's adaptive verification behind the engine contract: its scheduler plans drafts for all rows, and its manager
chooses how many of a batch are verified, and which.

The manager is that of the release, with tensors of the CPU; its streams and events have stand-ins, and its ranking is
not compiled. The suite's confidences are those of a draft with a confidence head: probabilities of acceptance. They are
recorded when a step has run, as vLLM's model runner does, so a budget knows those of the round before.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...properties.engine.contract import Event, ServingConfig, StepAnswer
from .vllm import Settings, open_vllm
from .vllm_scheduler import VLLMScheduler, adapter_of

_FOLDER = "vllm.v1.worker.gpu.spec_decode"


class _NoStream:
    """A stream or an event of a device that has run everything at once."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class _TorchOfCPU:
    """torch, without streams and events of a device."""

    cuda = SimpleNamespace(Stream=_NoStream, Event=_NoStream, current_stream=_NoStream)

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class _Buffer:
    """A tensor and its copy for the host: `gpu`, `cpu`, and `np`, which is the copy's memory."""

    def __init__(self, *size: int, dtype: Any, device: Any) -> None:
        torch = importlib.import_module("torch")
        self.gpu, self.cpu = torch.zeros(*size, dtype=dtype), torch.zeros(*size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_cpu(self) -> Any:
        return self.cpu.copy_(self.gpu)


def _copied(values: np.ndarray, out: Any) -> Any:
    return out.copy_(importlib.import_module("torch").from_numpy(values))


@cache
def open_verification() -> Any:
    """Return the release's module of adaptive verification."""
    open_vllm(any_release=True)
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: Settings(broadcast_object=lambda value, src: value)
        },
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _copied},
        "vllm.v1.utils": {"CpuGpuBuffer": _Buffer},
        "vllm.v1.worker.gpu.async_utils": {"stream": lambda *_: nullcontext()},
    }
    for name, attributes in stand_ins.items():
        vars(importlib.import_module(name)).update(attributes)
    module = importlib.import_module(f"{_FOLDER}.adaptive_verification")
    vars(module)["torch"] = _TorchOfCPU(module.torch)
    vars(module)["_assign_draft_token_budget_compiled"] = module._assign_draft_token_budget
    return module


@cache
def open_estimator() -> Any:
    """Return the release's module that estimates acceptance. Its kernels need Triton, and its interpreter on a CPU."""
    open_vllm(any_release=True)
    triton, language = importlib.import_module("triton"), importlib.import_module("triton.language")
    vars(importlib.import_module("vllm.triton_utils")).update(triton=triton, tl=language)
    return importlib.import_module(f"{_FOLDER}.acceptance_estimator")


class RowStates:
    """The state of requests in a model runner, as far as the manager reads it: which request has which row."""

    def __init__(self, rows: int, tokens: int, steps: int) -> None:
        self.max_num_reqs, self.max_num_batched_tokens, self.num_speculative_steps = rows, tokens, steps
        self.device: Any = importlib.import_module("torch").device("cpu")
        self.req_id_to_index: dict[str, int] = {}
        self.num_computed_tokens_np: np.ndarray = np.zeros(rows, dtype=np.int32)
        self.prefill_len: Any = Settings(np=np.zeros(rows, dtype=np.int32))
        self._free = list(range(rows))

    def add(self, request: str) -> int:
        row = self.req_id_to_index[request] = self._free.pop()
        return row

    def remove(self, request: str) -> None:
        self._free.append(self.req_id_to_index.pop(request))


def make_manager(states: RowStates, most_logits: int = 1 << 20) -> Any:
    """Return a manager of the release for these rows."""
    torch = importlib.import_module("torch")
    places = torch.zeros(states.max_num_reqs + 1, dtype=torch.int32)
    return open_verification().AdaptiveVerificationManager(states, places, 1, most_logits)


class VLLMVerification(VLLMScheduler):
    """The scheduler with the manager of a model runner."""

    def __init__(self, config: ServingConfig, policy: str, is_async: bool, is_capped: bool, drops_block: bool) -> None:
        super().__init__(config, policy, is_async, is_capped, drops_block)
        tokens = 2 * (config.chunk_size + config.max_running * (config.max_steps + 1))
        self.states: RowStates = RowStates(config.max_running, tokens, config.max_steps)
        self.manager: Any = make_manager(self.states)
        of_pass, of_token = map(float, config.costs)
        self.manager.set_cost_curves([(1, 0.0)], [(tokens, of_pass + of_token * tokens) for tokens in (1, 2)])
        self.made += f"; AdaptiveVerificationManager with verify_cost(tokens) = {of_pass:g} + {of_token:g} · tokens"

    def plan(self) -> dict[str, Any] | None:
        if self.flights:
            return None
        view = super().plan()
        running = {request.request_id for request in self.core.running}
        entered = {self.ids[name] for name in view["enters"]} if view is not None else set()
        for id in [id for id in self.states.req_id_to_index if id not in running or id in entered]:
            self.states.remove(id)
        if view is None:
            return None
        _, output, parts = self.flights[-1]
        for id, end, _ in parts:
            if id in entered:
                self.manager.add_request(self.states.add(id))
            row = self.states.req_id_to_index[id]
            self.states.prefill_len.np[row] = self.ends[id]
            self.states.num_computed_tokens_np[row] = end - output.num_scheduled_tokens[id]
        if view["decode"]:
            view |= {"budget": self._budget_of(output), "curve": (1.0, (0.0,) * self.config.max_steps)}
        return view

    def _budget_of(self, output: Any) -> int:
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return 0
        total = self.manager.get_num_tokens(output.num_scheduled_tokens, drafts)
        return int(total - sum(output.num_scheduled_tokens.values()) + sum(map(len, drafts.values())))

    def lengths(self, step: int, confidences: Any) -> list[int]:
        _, output, parts = self.flights[0]
        rows = [id for id, _, is_chunk in parts if not is_chunk]
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return [0] * len(rows)
        ids = list(output.num_scheduled_tokens)
        places = self.manager.reallocate_drafts(ids, self._rows(ids))[1]
        tokens = dict(zip(ids, np.diff(places.numpy()[: len(ids) + 1]).tolist(), strict=True))
        roots = {id: output.num_scheduled_tokens[id] - len(drafts.get(id, ())) for id in rows}
        return [tokens[id] - roots[id] for id in rows]

    def commit(self, answer: StepAnswer) -> list[Event]:
        flight = self.flights[0] if self.flights else None
        events = super().commit(answer)
        if flight is not None and answer.proposed:
            num_chunks = len(answer.first)
            chunks, rows = iter(answer.proposed[:num_chunks]), iter(answer.proposed[num_chunks:])
            values = [next(chunks if is_chunk else rows) for _, _, is_chunk in flight[2]]
            batch = Settings(num_reqs=len(values), idx_mapping=self._rows([id for id, _, _ in flight[2]]))
            self.manager.record_confidences(importlib.import_module("torch").tensor(values), batch)
        return events

    def _rows(self, ids: list[str]) -> Any:
        return importlib.import_module("torch").tensor([self.states.req_id_to_index[id] for id in ids])

    def confidences_of(self, request: str) -> list[float] | None:
        row = self.states.req_id_to_index.get(self.ids[request])
        known = self.manager._stale_confidences[self.manager._stale_idx].np
        return None if row is None else known[row].tolist()


make = adapter_of(VLLMVerification, "fcfs", False, "ragged_drafts", "budgets", "own_ties", drafts="of all rows")
