"""Planted defects, in the engine and in the executor: the pairwise cover must notice each of them."""

import dataclasses

import numpy as np
import pytest
from foretoken.checks.driver import Dice
from foretoken.checks.matrix import Cell, pairwise_cells, random_cell, run_cell, run_cell_in_blocks
from foretoken.core.algorithm.builtin import Eagle
from foretoken.core.contract.request import CutRuns
from foretoken.core.kv import store as store_module
from foretoken.core.kv.store import KVStore
from foretoken.core.scheduler import config as engine_config
from foretoken.core.scheduler import output, rounds
from foretoken.core.scheduler.admission import Admission
from foretoken.core.scheduler.engine import Engine
from foretoken.core.scheduler.requests import Requests
from foretoken.core.scheduler.rounds import DecodeRounds
from foretoken.core.scheduler.waiting import least_entitled
from foretoken.core.tree.outputs import NodeOutputs
from foretoken.properties.reference import drafting, executor, shadow
from foretoken.properties.reference.executor import ReferenceExecutor

CELLS = pairwise_cells(seed=2, attempts=6)
# Prompts that begin alike and are computed in one step: both requests hold the prefix until the cache has taken one copy.
ALIKE = {"prefixes": "shared", "cache": True, "chunk_size": 64, "arrivals": "at once", "pool": "tight"}
CELLS += [random_cell(Dice(seed), seed, ALIKE) for seed in range(100, 112)]


def noticed(run=run_cell) -> bool:
    """Whether some cell of the cover fails."""
    return any(noticed_in(cell, run) for cell in CELLS)


def noticed_in(cell: Cell, run=run_cell) -> bool:
    try:
        run(cell)
    except Exception:
        return True
    return False


def allocation_for_one_step_less_than_the_maximum(patch):
    real = engine_config.get_alloc_len_per_decode
    patch.setattr(
        engine_config,
        "get_alloc_len_per_decode",
        lambda steps, topk, nodes, page, draft=True: max(1, real(steps, topk, nodes, page, draft) - 1),
    )


def rejected_positions_cached(patch):
    real = KVStore.close_row

    def close_row(self, departure, last_committed):
        departure = store_module.Departure(
            departure.fence,
            departure.row,
            None if departure.tokens is None else np.append(departure.tokens, [7, 7, 7, 7]),
            departure.num_valid + 4,
            departure.namespace,
        )
        real(self, departure, last_committed)

    patch.setattr(KVStore, "close_row", close_row)


def row_not_pointed_at_the_canonical_slots(patch):
    real = KVStore.share_prefix

    def share_prefix(self, *arguments):
        self._write = lambda row, start, slots: None
        try:
            real(self, *arguments)
        finally:
            del self._write

    patch.setattr(KVStore, "share_prefix", share_prefix)


def namespaces_ignored(patch):
    real = KVStore.match
    patch.setattr(KVStore, "match", lambda self, tokens, namespace: real(self, tokens, ""))
    release = KVStore._release

    def into_one(self, departure):
        release(self, store_module.Departure(departure.fence, departure.row, departure.tokens, departure.num_valid, ""))

    patch.setattr(KVStore, "_release", into_one)


def retracted_requests_forget_their_output(patch):
    real = output.OutputLog.close

    def close(self, record):
        real(self, record)
        record.emitted_before = 0

    patch.setattr(output.OutputLog, "close", close)


def departed_rows_settled(patch):
    real = DecodeRounds.count

    def count(self, launched, result, num_left_at_plan, leaving):
        return real(self, launched, result, self.num_left, ())

    patch.setattr(DecodeRounds, "count", count)


def stop_masked_by_the_length_cap(patch):
    real = rounds.cut_runs

    def cut_runs(accept_lens, stop_index, remaining):
        runs = real(accept_lens, stop_index, remaining)
        return CutRuns(runs.kept, runs.ended, runs.stopped & (runs.kept < remaining))

    patch.setattr(rounds, "cut_runs", cut_runs)


def one_token_past_the_cap(patch):
    real = Requests.begin_decoding

    def begin(self, record):
        real(self, record)
        self.rounds.end_len[record.row] += 1

    patch.setattr(Requests, "begin_decoding", begin)


def preempted_after_its_slots_were_reserved(patch):
    real = Admission.plan_prefill

    def plan_prefill(self, num_verify_tokens):
        requests = self.requests
        if self.config.mixed and len(requests.running) > 1 and len(requests.waiting) and requests.last_step_id % 5 == 0:
            requests.retract(least_entitled(requests.running.values()))
        return real(self, num_verify_tokens)

    patch.setattr(Admission, "plan_prefill", plan_prefill)


def moves_scattered_before_gathered(patch):
    def backwards(pool, plan):
        for src, dst in zip(plan.src[::-1], plan.dst[::-1], strict=True):
            pool[dst] = pool[src]

    patch.setattr(shadow, "apply_moves", backwards)


def no_catch_up_when_all_is_accepted(patch):
    real = ReferenceExecutor._write_draft

    def write(self, row, start, tokens, hashes, next_token):
        if len(tokens) > 2:
            tokens, hashes = tokens[:-1], hashes[:-1]
        real(self, row, start, tokens, hashes, next_token)

    patch.setattr(ReferenceExecutor, "_write_draft", write)


def chunk_tail_taken_from_the_sample(patch):
    real = ReferenceExecutor._draft_prefill

    def draft_prefill(self, row, start, prefix, next_token):
        token = int(self.model.argmax(prefix.hashes[-1:], prefix.tokens[-1:])[0])
        real(self, row, start, prefix, token)

    patch.setattr(ReferenceExecutor, "_draft_prefill", draft_prefill)


def bonus_gathered_with_the_wrong_stride(patch):
    from foretoken.core.tree import finalize

    def gather_last(emitted, accept_lens):
        rows, width = emitted.shape
        places = np.arange(rows) * max(width - 1, 1) + accept_lens - 1
        return np.maximum(emitted.reshape(-1)[places], 0)

    patch.setattr(finalize, "gather_last", gather_last)


def feedback_of_departed_rows_counted(patch):
    real = DecodeRounds.teach_controller
    patch.setattr(
        DecodeRounds, "teach_controller", lambda self, step, result, live, before: real(self, step, result, None, None)
    )


def too_much_reserved(patch):
    grow = KVStore.grow

    def generous(self, rows, targets):
        return grow(
            self, rows, np.minimum(targets + 2 * self.page_size + 40 // self.page_size * self.page_size, self.row_width)
        )

    patch.setattr(KVStore, "grow", generous)


def failed_requests_go_on(patch):
    real = Engine.commit

    def commit(self, result, now_ns):
        return real(self, dataclasses.replace(result, failures=()), now_ns)

    patch.setattr(Engine, "commit", commit)


def released_cells_kept(patch):
    from foretoken.core.contract.future_map import FutureMap

    patch.setattr(FutureMap, "drop", lambda self, rows: None)


def blocks_planned_while_a_request_could_enter(patch):
    def max_rounds(self):
        if self.rounds.single_round_rows or any(flight.step.max_rounds > 1 for flight in self.requests.in_flight):
            return 1
        return 1 if self.requests.in_progress is not None else self.config.block_rounds

    patch.setattr(Engine, "_max_rounds", max_rounds)


def the_controller_is_not_asked_how_long(patch):
    from foretoken.core.adaptive import AdaptiveController

    patch.setattr(AdaptiveController, "rounds_to_next_decision", lambda self, bs: 1 << 30)


def replace(where, attribute, replacement):
    return lambda patch: patch.setattr(where, attribute, replacement)


def by_name(*plants):
    return {plant.__name__: plant for plant in plants}


IN_ONE_ENGINE = {
    "slots_freed_under_a_step_in_flight": replace(Requests, "_fence_of", lambda self, row: 0),
    "reserve_of_one_round_in_overlap_mode": replace(
        engine_config, "reserve_per_decode", lambda alloc_len, overlap: alloc_len
    ),
    "token_keys_where_bigrams_are_needed": replace(Eagle, "prefix_key_kind", lambda self: "token"),
    "captures_left_uncompacted": replace(NodeOutputs, "compact", lambda self, accept_index, num_draft_tokens: self),
    "accepted_path_not_moved": replace(shadow.ShadowPool, "move", lambda self, plan: None),
    "branches_do_not_follow_their_parents": replace(drafting._Branches, "_follow", lambda self, sources, written: None),
    "hidden_states_in_standalone": replace(
        ReferenceExecutor, "_draft_hidden", lambda self, hashes: executor.hidden_of(hashes)
    ),
} | by_name(
    allocation_for_one_step_less_than_the_maximum,
    rejected_positions_cached,
    row_not_pointed_at_the_canonical_slots,
    namespaces_ignored,
    retracted_requests_forget_their_output,
    departed_rows_settled,
    stop_masked_by_the_length_cap,
    one_token_past_the_cap,
    preempted_after_its_slots_were_reserved,
    moves_scattered_before_gathered,
    no_catch_up_when_all_is_accepted,
    chunk_tail_taken_from_the_sample,
    bonus_gathered_with_the_wrong_stride,
    released_cells_kept,
    feedback_of_departed_rows_counted,
    too_much_reserved,
    failed_requests_go_on,
)
BETWEEN_BLOCKS_AND_SINGLE_ROUNDS = {
    "a_stop_that_never_arrives": replace(ReferenceExecutor, "request_stop", lambda self, last_step_id: None),
    "blocks_keep_what_they_reserved": replace(DecodeRounds, "release_unused", lambda self, *arguments: None),
    "newcomers_never_wake_the_driver": replace(Admission, "could_enter", lambda self, record: False),
    "aborted_rounds_forgotten": replace(Requests, "_is_in_running_block", lambda self, record: False),
} | by_name(
    blocks_planned_while_a_request_could_enter,
    the_controller_is_not_asked_how_long,
)


@pytest.mark.parametrize("plant", IN_ONE_ENGINE.values(), ids=IN_ONE_ENGINE)
def test_a_planted_defect_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert noticed()


@pytest.mark.parametrize("plant", BETWEEN_BLOCKS_AND_SINGLE_ROUNDS.values(), ids=BETWEEN_BLOCKS_AND_SINGLE_ROUNDS)
def test_a_planted_difference_between_blocks_and_rounds_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert noticed(run_cell_in_blocks)


def test_without_a_defect_nothing_is_noticed():
    assert not any(noticed_in(cell) for cell in CELLS[:10])
