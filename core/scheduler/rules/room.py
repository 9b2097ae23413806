"""The slots that a request must find to enter, and those that it must leave free, by the rules of a server."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ...contract.request import Request
from ...kv.groups import GroupSizes
from ...kv.radix import PrefixMatch
from ...kv.request_table import ceil_to_page
from ...kv.store import KVStore
from ..config import EngineConfig, EngineRole, EngineSizes
from ..life import RequestRecord
from ..requests import Requests
from .admission_state import GuaranteedShare
from .server_rules import Growth, Newcomer, Others, ServerRules


class Entrance(NamedTuple):
    """What a waiting request takes if it enters now, beside its row."""

    prefix: PrefixMatch | None  # what the cache has of its context
    num_loaded: int  # tokens behind it that come from host memory
    padding: int  # tokens of a round beside its own (`ServerRules.pads_lone_tokens`)
    num_slots: int  # what it must find free, with the cached prefix locked
    length: int  # the tokens for which that is


class Room:
    """Measures newcomers and the growth of the others, in slots."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes, store: KVStore, requests: Requests) -> None:
        self.config = config
        self.sizes = sizes
        self.store = store
        self.requests = requests
        self.groups: GroupSizes = config.group_sizes
        self.share: GuaranteedShare = config.rules.share()
        self._watermark = int(config.rules.watermark * store.allocator.num_total_slots)
        self.take_role(config.role)

    def take_role(self, role: EngineRole) -> None:
        """Take this role from now on. An engine that does not decode reserves nothing for rounds and outputs."""
        decodes = role is not EngineRole.PREFILL
        self.rules: ServerRules = self.config.rules if decodes else self.config.rules.without_guarantee()
        self._reserve = self.sizes.reserve if decodes else 0

    def slots_for_length(self, length: int) -> int:
        """Return the slots of `length` tokens and one reserve, page aligned."""
        return ceil_to_page(length + self._reserve, self.config.page_size)

    def measure(self, record: RequestRecord, budget: int, num_decoding: int, may_pad: bool = True) -> Entrance:
        """Return what a waiting request takes, in a step with `budget` tokens of prefill. `may_pad`: its chunk is the
        first of the step."""
        prefix = self._prefix_of(record)
        num_cached = prefix.length if prefix else 0
        num_loaded = self._num_in_host(record, num_cached)
        missing = record.prompt_len + record.emitted_before - num_cached - num_loaded
        stays_of_rounds = may_pad and missing == 1 and bool(num_decoding or num_cached or num_loaded)
        padding = self.rules.padding(self.sizes.max_draft_tokens) if stays_of_rounds else 0
        length = self._length_to_find(record, num_cached + num_loaded, budget, padding)
        return Entrance(prefix, num_loaded, padding, self._slots_to_find(length, num_cached), length)

    def has_own_room(self, entrance: Entrance, num_decoding: int, leaving: Sequence[int] = ()) -> bool:
        """Return whether the groups of layers with pools of their own have room for a newcomer, beside the next rounds
        of the others, once the rows `leaving` have given way."""
        if not self.config.groups:
            return True
        num_cached = entrance.prefix.length if entrance.prefix else 0
        rounds, size = self.requests.rounds, self.config.page_size
        left = self.slots_for_length(0) * num_decoding
        gained = (int(rounds.held_ahead()[1].sum()) - left) // size
        return self.store.groups.has_own_room(entrance.length, self.sizes.ahead, num_cached, gained, leaving)

    def _prefix_of(self, record: RequestRecord) -> PrefixMatch | None:
        if not self.store.cache.keeps_prefixes:
            return None
        if record.context is None:
            record.context = record.request.context()
            if record.context is None:
                return None
        # Without the token after the prefill, because the token before it must be computed in any case.
        known = record.context[: record.prompt_len + record.emitted_before]
        return self.store.match(known, record.request.namespace)

    def _num_in_host(self, record: RequestRecord, num_cached: int) -> int:
        if record.context is None:
            return 0
        known = record.context[: record.prompt_len + record.emitted_before]
        return self.store.num_in_host(known, record.request.namespace, num_cached)

    def tokens_that_fit(self, budget: int, num_decoding: int, enough: float) -> int:
        """Return the tokens of the waiting requests that could enter together, cached ones included, counted up to
        `enough`."""
        to_leave = self.to_leave(num_decoding) - self.requests.rounds.num_ahead
        num_tokens = num_computed = num_slots = 0
        with ExitStack() as locked:
            for num_rows, record in enumerate(self.requests.waiting):
                if num_tokens >= enough or num_rows >= self.store.table.num_free_rows:
                    break
                entrance = self.measure(record, budget, num_decoding)
                locked.enter_context(self.store.locked(entrance.prefix))
                length = record.prompt_len + record.emitted_before
                num_slots += entrance.num_slots
                num_computed += length - entrance.num_loaded - (entrance.prefix.length if entrance.prefix else 0)
                if num_slots + to_leave > self.store.available_slots or (num_rows and num_computed > budget):
                    break
                num_tokens += length
        return num_tokens

    def _length_to_find(self, record: RequestRecord, num_known: int, budget: int, padding: int = 0) -> int:
        """Return the tokens, page aligned, for which a waiting request must find slots. Its first chunk has at most
        `budget` tokens behind the `num_known` from the cache and host memory, and takes `padding` more."""
        context = record.prompt_len + record.emitted_before
        first_chunk = min(num_known + budget, context) + padding + self.sizes.lookahead
        newcomer = Newcomer(context, first_chunk, record.max_tokens - record.emitted_before, self._reserve)
        return ceil_to_page(self.rules.tokens_to_find(newcomer), self.config.page_size)

    def _slots_to_find(self, length: int, num_cached: int) -> int:
        """Return the slots of `length` tokens beyond the cached prefix, with what they take of other groups of layers
        while the chunks of the prompt are computed."""
        return length + self.groups.of(length, self.sizes.ahead, num_cached) - num_cached

    def to_find_for_transfer(self, request: Request, max_tokens: int) -> int:
        """Return the slots that a request must find whose prompt another engine computes. Its row takes those of the
        prompt and a reserve at once."""
        context = request.prefill_len
        newcomer = Newcomer(context, context, request.prompt.length + max_tokens - context, self._reserve)
        tokens = max(self.rules.tokens_to_find(newcomer), context + self._reserve)
        return self.groups.total(ceil_to_page(tokens, self.config.page_size), self.sizes.ahead)

    def to_leave(
        self, num_decoding: int, entering: Collection[RequestRecord] = (), held: Mapping[int, int] | None = None
    ) -> int:
        """Return the slots that a newcomer must leave free so that `num_decoding` requests can grow.

        `entering`: those of them that enter in the same step. `held`: the slots of each row; None: as it is now.
        """
        share = self.share.now(self._rounds_in_flight)
        growth = partial(self._growth, entering, held)
        return self.rules.slots_to_leave(Others(num_decoding, self.slots_for_length(0), self._watermark, share, growth))

    def _growth(self, entering: Collection[RequestRecord], held: Mapping[int, int] | None) -> Iterator[Growth]:
        records = self.requests.running | self.requests.transferring
        for row, slots in (self.held_rows() if held is None else held).items():
            record = records[row]
            whole = self.slots_for_length(record.prompt_len + record.max_tokens)
            total = partial(self.groups.total, ahead=self.sizes.reserve)
            yield Growth(record, total(whole) - total(slots), record in entering)

    def held_rows(self) -> dict[int, int]:
        """Return the slots of each row of a request, without those that a running multi-step holds ahead."""
        ahead_rows, ahead_slots = self.requests.rounds.held_ahead()
        ahead, allocated = dict(zip(ahead_rows.tolist(), ahead_slots.tolist(), strict=True)), self.store.allocated
        rows = (*self.requests.running, *self.requests.transferring)
        return {row: int(allocated[row]) - ahead.get(row, 0) for row in rows}

    def estimate_share(self) -> None:
        """Estimate anew, after a retraction, what the running requests will emit."""
        num_outputs = self.requests.output.num_delivered
        self.share.estimate(self.requests.running.values(), num_outputs, self._rounds_in_flight)

    @property
    def _rounds_in_flight(self) -> int:
        # A running multi-step counts as one round: a plan that admits a request comes after its first.
        return sum(flight.is_decode_only for flight in self.requests.in_flight)
