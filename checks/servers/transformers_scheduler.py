"""A scheduler that is not ours: the one of Hugging Face transformers' continuous batching, with its paged cache.

Its batch processor is driven as its own loop drives it: `prepare_next_batch`, then the model, then `update_batch`. The
suite is the model: it reads the tokens that the processor hands to the model, and writes the sampled ones where the
model would. Nothing else is replaced. What the loop does before each batch with new and cancelled requests is done at
once when no batch is running. Needs transformers 5 with torch.

The scheduler mixes prefill and decode under one budget of tokens, and its pages hold at least 4 tokens: see `supports`.

The suite found a bug in it (transformers 5.23.0), which docs/properties.md tells: after a request has been put back for
want of memory, nothing new is admitted until another request *finishes*. If all others are cancelled instead, none is
ever admitted again (ENGINE-11).
"""

from __future__ import annotations

import importlib
import logging
import queue
from collections.abc import Iterable, Sequence

from ...properties.engine.contract import EngineCapabilities, Event, ServingConfig, StepAnswer, Wish
from .transformers_blocks import require

_PACKAGE = "transformers.generation.continuous_batching"
HEAD_DIM = 16  # with one layer and one head, a page is a whole number of 128 bytes: every sector is one block

try:
    torch = importlib.import_module("torch")
    _TRANSFORMERS = importlib.import_module("transformers")
    _API = importlib.import_module(f"{_PACKAGE}.continuous_api")
    _CACHE = importlib.import_module(f"{_PACKAGE}.cache")
    _REQUESTS = importlib.import_module(f"{_PACKAGE}.requests")
    _SCHEDULERS = importlib.import_module(f"{_PACKAGE}.scheduler")
    _PROCESSORS = importlib.import_module(f"{_PACKAGE}.cb_logits_processors")
    _DISTRIBUTED = importlib.import_module(f"{_PACKAGE}.distributed")
    MISSING = ""
except ImportError as error:
    MISSING = str(error)
"""Why transformers cannot be imported, "" if it can."""


class TransformersEngine:
    """Requests by name; block b of the cache is page b - 1, as the first two blocks are never given out."""

    def __init__(self, config: ServingConfig) -> None:
        self.config = config
        model = _TRANSFORMERS.LlamaConfig(
            num_hidden_layers=1, hidden_size=HEAD_DIM, num_attention_heads=1, num_key_value_heads=1, vocab_size=64
        )
        model._attn_implementation = "eager"
        batching = _TRANSFORMERS.ContinuousBatchingConfig(
            page_size=config.page_size,
            num_blocks=config.num_pages,
            max_batch_tokens=_budget(config),
            max_requests_per_batch=config.max_running,
            max_blocks_per_request=0,
            max_memory_percent=0.9,
            allow_block_sharing=config.prefix_cache,
            use_async_batching=False,
            use_cuda_graph=(False, False),
            safety_margin=0.0,
            seed=0,
        )
        helper = _DISTRIBUTED.DistributedHelper(None, None)
        device, dtype = torch.device("cpu"), torch.float32
        self.cache = _CACHE.PagedAttentionCache(model, batching, device, helper, dtype)
        self.scheduler = _SCHEDULERS.FIFOScheduler(self.cache, 0.0, config.max_running)
        self.outputs: list = []
        router = _API.OutputRouter()
        router.deliver_batch = self.outputs.extend
        self.cancellations: queue.Queue = queue.Queue()
        self.arrivals: queue.Queue = queue.Queue()
        # Its own end collects all garbage of the process, which takes longer than a run.
        processor = type("Processor", (_API.ContinuousBatchProcessor,), {"__del__": lambda processor: None})
        self.processor = processor(
            cache=self.cache,
            config=model,
            generation_config=_TRANSFORMERS.GenerationConfig(do_sample=False),
            continuous_batching_config=batching,
            logit_processor=_PROCESSORS.ContinuousBatchingLogitsProcessorList(_TRANSFORMERS.LogitsProcessorList()),
            input_queue=self.arrivals,
            cancel_queue=self.cancellations,
            output_router=router,
            background_thread_status=_API.BackgroundThreadStatus(),
            model_device=device,
            model_dtype=dtype,
            scheduler=self.scheduler,
            distributed_helper=helper,
        )
        self.number = 0
        self.batch: list | None = None  # of the step in flight
        self.num_ids = 0
        # by the ids that the scheduler knows: a name may come again while its last batch runs
        self.wishes: dict[str, Wish] = {}
        self.ids: dict[str, str] = {}  # name -> id, of those that live
        self.delivered: dict[str, list[int]] = {}
        self.has_cancelled = False  # while a batch runs

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> int:
        room = min(self.config.context_len, self.config.num_slots)
        most = min(wish.max_tokens, room - len(wish.prompt))
        if most < 1 or wish.request in self.ids:
            raise ValueError("it does not fit, or is there already")  # its front end leaves both to its caller
        self.num_ids += 1
        id = self.ids[wish.request] = f"{wish.request}#{self.num_ids}"
        state = _REQUESTS.RequestState(
            id,
            list(wish.prompt),
            streaming=True,
            max_new_tokens=most,
            eos_token_id=list(wish.stop_tokens),
        )
        self.wishes[id], self.delivered[id] = wish, []
        self.arrivals.put(state)
        self.processor._update_tp_group_state()
        return most

    def abort(self, request: str) -> list[Event]:
        if request not in self.ids:
            return []
        id = self.ids.pop(request)
        self.cancellations.put(id)
        self.has_cancelled = True
        if self.batch is None:
            self._cancel()
        return [("end", request, "abort", self.delivered.pop(id), None)]

    def _cancel(self) -> None:
        """Do what the loop does with cancelled requests before each batch."""
        self.processor._update_tp_group_state()
        self.scheduler.clear_cancelled_requests()
        self.has_cancelled = False

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> dict | None:
        before = set(self.scheduler.active_requests)
        if self.batch is not None or not self.processor.prepare_next_batch():
            return None
        io = self.processor.inputs_and_outputs
        self.batch = io.requests_in_batch
        self.number += 1
        prefill, decode, at = [], [], 0
        tokens = io.input_ids.flatten().tolist()
        for item in self.batch:
            state, stop = item.state, at + item.query_length
            start = state.position_offset - item.query_length
            wish = self.wishes[state.request_id]
            name, key = wish.request, wish.seed
            if start < len(state.initial_tokens):
                rest = state.initial_tokens[state.position_offset :]
                prefill.append((name, start, tokens[at:stop], rest[0] if rest else -1, key))
            else:
                decode.append((name, start, tokens[at], key))
            at = stop
        view = {"step": self.number, "prefill": prefill, "decode": decode, "steps": 0, "rounds": 1}
        new = [item.state.request_id for item in self.batch if item.state.request_id not in before]
        return view | {"enters": [self.wishes[id].request for id in new]}

    def commit(self, answer: StepAnswer) -> list[Event]:
        if answer.step != self.number or self.batch is None:
            raise ValueError(f"step {answer.step} is not in flight")
        first, rows = iter(answer.first), iter(answer.runs[0] if answer.runs else ())
        sampled = []
        for item in self.batch:
            is_prompt = item.state.position_offset - item.query_length < len(item.state.initial_tokens)
            token = next(first) if is_prompt else next(rows)[0]
            if item.has_new_token:
                sampled.append(token)
        self.processor.inputs_and_outputs.output_ids[0, : len(sampled)] = torch.tensor(sampled, dtype=torch.int32)
        self.processor.update_batch()
        self.batch = None
        events: list[Event] = []
        for output in self.outputs:
            if output.request_id in self.delivered:
                events += self._events(output)
        self.outputs.clear()
        if self.has_cancelled:
            self._cancel()
        return events

    def _events(self, output) -> list[Event]:
        id, before = output.request_id, self.delivered[output.request_id]
        wish = self.wishes[id]
        self.delivered[id] = tokens = list(output.generated_tokens)
        events: list[Event] = [("tokens", wish.request, tokens[len(before) :])] if len(tokens) > len(before) else []
        if output.is_finished():
            reason = "stop" if tokens[-1] in wish.stop_tokens else "length"
            del self.ids[wish.request]
            events.append(("end", wish.request, reason, self.delivered.pop(id), None))
        return events

    # -- what it shows ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        return self._names(self.scheduler.waiting_requests_order)

    def running(self) -> list[str]:
        return self._names(self.scheduler.active_requests)

    def _names(self, ids: Iterable[str]) -> list[str]:
        return [self.wishes[id].request for id in ids if id in self.delivered]

    @property
    def allocator(self):
        (allocator,) = self.cache.cache_allocators.values()
        return allocator

    def slots_of(self, request: str) -> list[int]:
        size = self.config.page_size
        pages = [block - 1 for block in self.allocator.block_table.get(self.ids[request], [])]
        return [page * size + offset for page in pages for offset in range(size)]

    def free_pages(self) -> Sequence[int]:
        trees = self.cache.pool._free_blocks[0].trees
        return [block - 1 for block in (*self.cache.pool.free_sectors, *(b for tree in trees.values() for b in tree))]

    def cached_pages(self) -> Sequence[int]:
        return [block - 1 for block in self.allocator.ledger.block_to_hash]


def make(config: ServingConfig) -> TransformersEngine:
    """Make a fresh scheduler over an empty cache. Raises `TransformersMissing`."""
    require(MISSING)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    return TransformersEngine(config)


def supports(config: ServingConfig) -> bool:
    """Return whether a configuration does not speculate, mixes prefill and decode, has pages of four tokens at
    least, and one budget that leaves a token for a prompt beside a row of each request."""
    is_served = config.algorithm == "none" and config.mixed and config.page_size >= 4 and not config.max_queue
    return is_served and _budget(config) > config.max_running


def _budget(config: ServingConfig) -> int:
    """Return the tokens of a step, prompts and outputs together."""
    return min(config.step_tokens or config.chunk_size, config.chunk_size)


make.capabilities = EngineCapabilities(slots=True, chunked_prefill=True, mixed=True, prefix_cache=True)
make.supports = supports
