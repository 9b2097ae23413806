"""vLLM's scheduler behind the engine contract, in the loop of its `EngineCore`. Drafts come after each step from a
proposer of chains, or from EAGLE, whose drafts have KV.

One budget of tokens bounds a step, prompts and outputs together. vLLM's front end refuses what is too long, so the
adapter does. Its start refuses a pool that is smaller than the context, and a budget that is smaller than the batch, so
`supports` does. `make_drafts` has a budget for all verify windows of a batch, `make_drafts_in_less` a smaller one,
which vLLM's start accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ...properties.engine.contract import Event, ServingConfig, StepAnswer, Wish
from ...properties.harness.contract import Adapter
from .release import Recorded
from .vllm import SchedulerSettings, Settings, make_request, make_scheduler, module_of

Drafts = Literal["none", "of all rows", "in less"]
DRAFT = 1  # what a draft token is does not matter: the suite's device says how many are right
REASONS = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length"}


class VLLMScheduler:
    """A scheduler of the release. A name may come again while its last step runs, so requests have ids of their own."""

    def __init__(
        self, config: ServingConfig, policy: str, is_async: bool, is_capped: bool, drops_block: bool = False
    ) -> None:
        budget = _budget(config)
        settings = SchedulerSettings(
            num_blocks=config.num_pages,
            block_size=config.page_size,
            max_running=config.max_running,
            budget=budget,
            context_len=config.context_len,
            steps=config.max_steps,
            is_eagle=config.lookahead,
            drops_block=drops_block,
            is_async=is_async,
            caches=config.prefix_cache,
            more={"policy": policy, "long_prefill_token_threshold": max(budget // 2, 1) if is_capped else 0},
        )
        self.config: ServingConfig = config
        self.hash_lookahead: int = settings.hash_lookahead
        self.own_calls: list[str] | None = None
        given = f"max_num_seqs={config.max_running}, max_num_batched_tokens={budget}, policy={policy!r}"
        if is_capped:
            given += f", long_prefill_token_threshold={max(budget // 2, 1)}"
        self.made: str = (
            f"scheduler = {'Async' if is_async else ''}Scheduler(…)  # {given}, {config.num_pages} blocks of "
            f"{config.page_size} and the null block, max_model_len={config.context_len}, "
            f"enable_prefix_caching={config.prefix_cache}, num_speculative_tokens={config.max_steps}, use_eagle={config.lookahead}"
        )
        self.core: Any = make_scheduler(settings)
        self.scheduler: Any = Recorded(self.core, "scheduler", self, _told)
        self.requests: dict[str, Any] = {}  # by id: all that were sent
        self.wishes: dict[str, Wish] = {}
        self.ids: dict[str, str] = {}  # name -> id, of those that live
        self.ends: dict[str, int] = {}  # id -> where its prefill ends, since it last entered
        self.delivered: dict[str, list[int]] = {}
        self.flights: list[tuple[int, Any, list[tuple[str, int, bool]]]] = []  # (step, output, (id, end, is chunk))
        self.number: int = 0
        # A request gave way and nothing was planned: the loop of `EngineCore` waits for the step in flight then.
        self.is_waiting: bool = False

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> int:
        most = min(wish.max_tokens, self.config.context_len - len(wish.prompt))
        if most < 1 or wish.request in self.ids:
            raise ValueError("it does not fit, or is there already")
        id = self.ids[wish.request] = f"{wish.request}{len(self.requests) or ''}"
        sampling = Settings(max_tokens=wish.max_tokens, stop_token_ids=list(wish.stop_tokens), min_tokens=0)
        self.requests[id] = made = make_request(
            id,
            wish.prompt,
            self.config.page_size,
            sampling_params=sampling,
            priority=-wish.priority,
            arrival_time=float(len(self.requests)),
            caches=self.config.prefix_cache,
            hash_lookahead=self.hash_lookahead,
        )
        self.wishes[id], self.delivered[id] = wish, []
        if self.own_calls is not None:
            kept = f"max_tokens={wish.max_tokens}, stop_token_ids={list(wish.stop_tokens)}, priority={-wish.priority}"
            self.own_calls.append(f"{id} = Request({list(wish.prompt)}, {kept})")
        self.scheduler.add_request(made)
        return most

    def abort(self, request: str) -> list[Event]:
        id = self.ids.pop(request, None)
        if id is None:
            return []
        self.scheduler.finish_requests(id, module_of("request").RequestStatus.FINISHED_ABORTED)
        return [("end", request, "abort", self.delivered.pop(id), None)]

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> dict[str, Any] | None:
        if len(self.flights) == self.config.depth or self.is_waiting:
            return None
        before = {id: request.num_computed_tokens for id, request in self.core.requests.items()}
        output = self.scheduler.schedule()
        enters = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        others = output.scheduled_cached_reqs
        for id, num_computed in zip(others.req_ids, others.num_computed_tokens, strict=True):
            if id in others.resumed_req_ids:
                enters[id] = num_computed
        if not output.num_scheduled_tokens:
            self.core.update_from_output(output, _result({}))
            self.is_waiting = bool(self.flights and output.preempted_req_ids)
            return None
        prefill, decode, parts = [], [], []
        for id, count in output.num_scheduled_tokens.items():
            request, wish = self.requests[id], self.wishes[id]
            if id in enters:
                before[id], self.ends[id] = enters[id], request.num_tokens
            start, tokens = before[id], request._all_token_ids
            is_chunk = start < self.ends[id]
            parts.append((id, start + count, is_chunk))
            if is_chunk:  # drafts behind the last token of a prompt are padding, which no one proposed
                tail = tokens[start + count] if start + count < self.ends[id] else -1
                prefill.append((wish.request, start, list(tokens[start : start + count]), tail, wish.seed))
            else:
                root = tokens[start] if start < len(tokens) else None
                row = (wish.request, start, root, wish.seed)
                decode.append((*row, count - 1) if self.config.max_steps else row)
        self.number += 1
        self.flights.append((self.number, output, parts))
        view = {
            "step": self.number,
            "prefill": prefill,
            "decode": decode,
            "steps": self.config.max_steps if decode else 0,
            "rounds": 1,
        }
        return view | {"enters": [self.wishes[id].request for id in enters if id in output.num_scheduled_tokens]}

    def commit(self, answer: StepAnswer) -> list[Event]:
        if not self.flights or answer.step != self.flights[0][0]:
            raise ValueError(f"step {answer.step} is not the oldest in flight")
        _, output, parts = self.flights.pop(0)
        self.is_waiting = False
        first, rows = iter(answer.first), iter(answer.runs[0] if answer.runs else ())
        sampled: dict[str, list[int]] = {}
        for id, end, is_chunk in parts:
            run = [next(first)] if is_chunk else list(next(rows))
            sampled[id] = run if not is_chunk or end >= self.ends[id] else []
        if self.own_calls is not None:
            self.own_calls.append(f"sampled_token_ids = {sampled}")
        before = {id: len(self.requests[id]._output_token_ids) for id in self.delivered}
        self.scheduler.update_from_output(output, _result(sampled))
        if self.config.max_steps:
            proposed = [id for id, tokens in sampled.items() if tokens]
            drafts = [[DRAFT] * self.config.max_steps for _ in proposed]
            self.scheduler.update_draft_token_ids(Settings(req_ids=proposed, draft_token_ids=drafts))
        return [event for id in list(self.delivered) for event in self._events(id, before[id])]

    def _events(self, id: str, before: int) -> list[Event]:
        request, name = self.requests[id], self.wishes[id].request
        new = list(request._output_token_ids[before:])
        events: list[Event] = [("tokens", name, new)] if new else []
        self.delivered[id] += new
        if request.is_finished():
            del self.ids[name]
            events.append(("end", name, REASONS[request.status.name], self.delivered.pop(id), None))
        return events

    # -- what it shows ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        return [self.wishes[request.request_id].request for request in self.core.waiting]

    def running(self) -> list[str]:
        return [self.wishes[request.request_id].request for request in self.core.running]

    def slots_of(self, request: str) -> list[int]:
        size = self.config.page_size
        (blocks,) = self.core.kv_cache_manager.get_block_ids(self.ids[request])
        return [block * size + offset for block in blocks for offset in range(size)]

    def free_pages(self) -> list[int]:
        free = self.core.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return [block.block_id for block in free if block.block_hash is None]

    def cached_pages(self) -> list[int]:
        pool = self.core.kv_cache_manager.block_pool
        return [block.block_id for block in pool.blocks if block.block_hash is not None]


def _budget(config: ServingConfig) -> int:
    """Return the tokens of a step, prompts and outputs together."""
    return min(config.step_tokens or config.chunk_size, config.chunk_size)


def _result(sampled: dict[str, list[int]]) -> Settings:
    """Return the output of a model runner."""
    return Settings(
        sampled_token_ids=list(sampled.values()),
        req_id_to_index={id: index for index, id in enumerate(sampled)},
        prompt_logprobs_dict={},
        prompt_token_id_logprobs_dict={},
    )


def _told(value: Any) -> str:
    match type(value).__name__:
        case "Request":
            return str(value.request_id)
        case "SchedulerOutput":
            preempted = f", preempted {sorted(value.preempted_req_ids)}" if value.preempted_req_ids else ""
            return f"num_scheduled_tokens {value.num_scheduled_tokens}{preempted}"
        case "Settings" | "dict":
            return "…"
        case "RequestStatus":
            return f"RequestStatus.{value.name}"
        case "list":
            return f"[{', '.join(map(_told, value))}]"
    return repr(value)


def adapter_of(
    kind: type[VLLMScheduler],
    policy: str,
    is_async: bool,
    *more: str,
    is_capped: bool = False,
    drafts: Drafts = "none",
    drops_block: bool = False,
) -> Callable[[ServingConfig], VLLMScheduler]:
    common = ("chunked_prefill", "mixed", "slots", "prefix_cache", "caches_at_allocation", "ordered_reuse")
    capabilities = (*common, "own_victims", *more)

    def supports(config: ServingConfig) -> bool:
        is_chain = config.topk == 1 and not config.tree_nodes and config.max_steps > 0
        is_chain = is_chain and config.algorithm == ("head" if config.lookahead else "draft")
        is_served = config.mixed and not config.max_queue and not config.preempt
        is_served = is_served and (is_chain if drafts != "none" else config.algorithm == "none")
        is_enough = _budget(config) > config.max_running * (config.max_steps + 1)
        is_served = is_served and is_enough is (drafts != "in less")
        is_valid = _budget(config) > config.max_running and config.num_slots >= config.context_len
        return is_served and is_valid and config.overlap == is_async

    return Adapter(lambda config: kind(config, policy, is_async, is_capped, drops_block), capabilities, supports)


make: Callable[[ServingConfig], VLLMScheduler] = adapter_of(VLLMScheduler, "fcfs", False)
make_by_priority: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "priority", False, "priorities", "strict_priorities"
)
make_capped: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "priority", False, "priorities", "strict_priorities", is_capped=True
)
make_drafts: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "fcfs", False, "ragged_drafts", drafts="of all rows"
)
make_drafts_in_less: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "fcfs", False, "ragged_drafts", drafts="in less"
)
make_eagle: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "fcfs", False, "ragged_drafts", "lookahead", drafts="of all rows"
)
make_eagle_drops: Callable[[ServingConfig], VLLMScheduler] = adapter_of(
    VLLMScheduler, "fcfs", False, "ragged_drafts", "lookahead", drafts="of all rows", drops_block=True
)
make_async: Callable[[ServingConfig], VLLMScheduler] = adapter_of(VLLMScheduler, "fcfs", True, "overlap", "late_tokens")
