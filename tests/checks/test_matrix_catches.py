"""Planted defects, in the engine and in the executor: the pairwise cover must notice each of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cells import MatrixCell, pairwise_cells, random_cell
from foredraft.checks.mutants.planting import Defects
from foredraft.core.adaptive import AdaptiveController
from foredraft.core.contract.future_map import FutureMap
from foredraft.core.kv.radix import RadixCache
from foredraft.core.kv.store import KVStore
from foredraft.core.scheduler import config, rounds
from foredraft.core.scheduler.admission import Admission
from foredraft.core.scheduler.engine import Engine
from foredraft.core.scheduler.flights import StepsInFlight
from foredraft.core.scheduler.output import OutputLog
from foredraft.core.scheduler.requests import Requests
from foredraft.core.scheduler.rounds import DecodeRounds
from foredraft.core.scheduler.waiting import least_entitled
from foredraft.core.tree import outputs
from foredraft.core.tree.outputs import NodeOutputs
from foredraft.properties.executor.reference import shadow
from foredraft.properties.executor.reference.drafting import _Branches
from foredraft.properties.executor.reference.executor import ReferenceExecutor
from foredraft.properties.executor.reference.language_model import hidden_of
from foredraft.properties.executor.reference.passes import ReferencePasses
from foredraft.properties.executor.reference.shadow import ShadowKV, ShadowPool
from hostile_driver import Dice
from serving_matrix import run_cell, run_cell_in_multi_steps

# Prompts that begin alike and are computed in one step: both requests hold the prefix until the cache has taken one
# copy. Most defects show in one of these; they come first.
ALIKE = {"prefixes": "shared", "cache": True, "chunk_size": 64, "arrivals": "at once", "pool": "tight"}


@cache
def cells() -> list[MatrixCell]:
    return [*(random_cell(Dice(seed), seed, ALIKE) for seed in range(100, 112)), *pairwise_cells(seed=2, attempts=6)]


def noticed(run=run_cell) -> bool:
    """Whether some cell of the cover fails."""
    return any(noticed_in(cell, run) for cell in cells())


def noticed_in(cell: MatrixCell, run=run_cell) -> bool:
    try:
        run(cell)
    except Exception:
        return True
    return False


IN_ONE_ENGINE = Defects("engine", None)


def a_slot_too_few(*arguments, good=config.get_alloc_len_per_decode):
    return max(1, good(*arguments) - 1)


def stops_before_the_cap(accept_lens, stop_index, remaining, good=rounds.cut_runs):
    runs = good(accept_lens, stop_index, remaining)
    return runs._replace(stopped=runs.stopped & (runs.kept < remaining))


def scatter_first(pool, plan):
    for src, dst in zip(plan.src[::-1], plan.dst[::-1], strict=True):
        pool[dst] = pool[src]


def gather_with_a_lane_less(emitted, accept_lens):
    num_rows, width = emitted.shape
    places = np.arange(num_rows) * max(width - 1, 1) + accept_lens - 1
    return np.maximum(emitted.reshape(-1)[places], 0)


@IN_ONE_ENGINE.breaks("MATRIX")
class SlotsFreedUnderAStepInFlight(StepsInFlight):
    """No step in flight is found that touches a row."""

    def fence_of(self, row):
        return 0


@IN_ONE_ENGINE.breaks("MATRIX", functions={config.reserve_per_decode: lambda alloc_len, overlap: alloc_len})
class ReserveOfOneRoundInOverlapMode(Engine):
    """A round in flight behind another has no slots of its own."""


@IN_ONE_ENGINE.breaks("MATRIX", functions={config.get_alloc_len_per_decode: a_slot_too_few})
class AllocationForOneStepLessThanTheMaximum(Engine):
    """The deepest round has a slot too few."""


@IN_ONE_ENGINE.breaks("MATRIX")
class TokenKeysWhereBigramsAreNeeded(RadixCache):
    """A draft head's prefix is found by its own tokens."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"key_kind": "token"})


@IN_ONE_ENGINE.breaks("MATRIX")
class CapturesLeftUncompacted(NodeOutputs):
    """Outputs stay where their nodes were."""

    def compact(self, accept_index, num_draft_tokens):
        return self


@IN_ONE_ENGINE.breaks("MATRIX")
class AcceptedPathNotMoved(ShadowPool):
    """KV stays where its nodes were."""

    def move(self, plan):
        pass


@IN_ONE_ENGINE.breaks("MATRIX")
class BranchesDoNotFollowTheirParents(_Branches):
    """A branch reads what its neighbour has written."""

    def _follow(self, sources, written):
        pass


@IN_ONE_ENGINE.breaks("MATRIX")
class HiddenStatesInStandalone(ReferencePasses):
    """Hidden states are captured for a draft that reads none."""

    def _draft_hidden(self, hashes):
        return hidden_of(hashes)


@IN_ONE_ENGINE.breaks("MATRIX")
class RejectedPositionsCached(KVStore):
    """Positions behind the end of a request are handed to the cache."""

    def close_row(self, departure, last_committed):
        tokens = None if departure.tokens is None else np.append(departure.tokens, [7, 7, 7, 7])
        super().close_row(departure._replace(tokens=tokens, num_valid=departure.num_valid + 4), last_committed)


@IN_ONE_ENGINE.breaks("MATRIX")
class RowNotPointedAtTheCanonicalSlots(KVStore):
    """A row goes on reading its own copies of a cached prefix."""

    def share_prefix(self, *arguments):
        self._write = lambda *_: None
        super().share_prefix(*arguments)
        del self._write


@IN_ONE_ENGINE.breaks("MATRIX")
class NamespacesIgnored(KVStore):
    """The namespace is no part of the key."""

    def match(self, tokens, namespace):
        return super().match(tokens, "")

    def _release(self, departure):
        return super()._release(departure._replace(namespace=""))


@IN_ONE_ENGINE.breaks("MATRIX")
class RetractedRequestsForgetTheirOutput(OutputLog):
    """What was delivered before a retraction is not counted."""

    def close(self, record):
        super().close(record)
        record.emitted_before = 0


@IN_ONE_ENGINE.breaks("MATRIX")
class DepartedRowsSettled(DecodeRounds):
    """Rows that have left are counted as if they were there."""

    def count(self, planned, result, num_departed_at_plan, leaving):
        return super().count(planned, result, self.num_departed, ())


@IN_ONE_ENGINE.breaks("MATRIX", functions={rounds.cut_runs: stops_before_the_cap})
class StopMaskedByTheLengthCap(Engine):
    """A stop in the last place ends by length."""


@IN_ONE_ENGINE.breaks("MATRIX")
class OneTokenPastTheCap(Requests):
    """A request ends one token late."""

    def begin_decoding(self, record):
        super().begin_decoding(record)
        self.rounds.end_len[record.row] += 1


@IN_ONE_ENGINE.breaks("MATRIX")
class PreemptedAfterItsSlotsWereReserved(Admission):
    """A request is retracted that the step has planned."""

    def plan_prefill(self, num_verify_tokens):
        requests = self.requests
        if self.config.mixed and len(requests.running) > 1 and len(requests.waiting) and requests.last_step_id % 5 == 0:
            requests.retract(least_entitled(requests.running.values()))
        return super().plan_prefill(num_verify_tokens)


@IN_ONE_ENGINE.breaks("MATRIX", functions={shadow.apply_moves: scatter_first})
class MovesScatteredBeforeGathered(Engine):
    """A source has been overwritten when it is read."""


@IN_ONE_ENGINE.breaks("MATRIX")
class NoCatchUpWhenAllIsAccepted(ShadowKV):
    """The draft's KV of a last draft that is accepted is not written."""

    def write_draft(self, row, start, tokens, hashes, next_token):
        end = -1 if len(tokens) > 2 else None
        super().write_draft(row, start, tokens[:end], hashes[:end], next_token)


@IN_ONE_ENGINE.breaks("MATRIX")
class ChunkTailTakenFromTheSample(ReferencePasses):
    """The token behind a chunk is the sampled one, not the prompt's."""

    def draft_prompt(self, row, start, prefix, next_token):
        token = int(self.model.argmax(prefix.hashes[-1:], prefix.tokens[-1:])[0])
        super().draft_prompt(row, start, prefix, token)


@IN_ONE_ENGINE.breaks("MATRIX", functions={outputs.gather_last: gather_with_a_lane_less})
class BonusGatheredWithTheWrongStride(Engine):
    """The bonus token is read with a stride of one lane less."""


@IN_ONE_ENGINE.breaks("MATRIX")
class ReleasedCellsKept(FutureMap):
    """The relay cell of a row that is released keeps its value."""

    def drop(self, rows):
        pass


@IN_ONE_ENGINE.breaks("MATRIX")
class FeedbackOfDepartedRowsCounted(DecodeRounds):
    """The controller is told of rows that have left."""

    def teach_controller(self, step, result, present):
        return super().teach_controller(step, result, present._replace(is_complete=True))


@IN_ONE_ENGINE.breaks("MATRIX")
class FailedRequestsGoOn(Engine):
    """What the executor reports as failed is not looked at."""

    def commit(self, result, now_ns):
        return super().commit(replace(result, failures=()), now_ns)


BETWEEN = Defects("engine", None)
"""Differences between multi-steps and single rounds."""


@BETWEEN.breaks("MATRIX")
class AStopThatNeverArrives(ReferenceExecutor):
    """A multi-step runs to its end."""

    def request_stop(self, last_step_id):
        pass


@BETWEEN.breaks("MATRIX")
class BlocksKeepWhatTheyReserved(DecodeRounds):
    """What a multi-step has not used stays with its rows."""

    def release_unused(self, planned, result, kv_before_last, in_later_step):
        pass


@BETWEEN.breaks("MATRIX")
class NewcomersNeverWakeTheDriver(Admission):
    """A newcomer waits for the end of the multi-step."""

    def could_enter_before_commit(self, record):
        return False


@BETWEEN.breaks("MATRIX")
class AbortedRoundsForgotten(StepsInFlight):
    """A request that is aborted in a multi-step ends at once."""

    def runs_multi_step_of(self, row):
        return False


@BETWEEN.breaks("MATRIX")
class BlocksPlannedWhileARequestCouldEnter(Admission):
    """The queue is not looked at before a multi-step."""

    def head_could_enter_soon(self):
        return False


@BETWEEN.breaks("MATRIX")
class TheControllerIsNotAskedHowLong(AdaptiveController):
    """A multi-step goes on where the step count may change."""

    def rounds_to_next_decision(self, bs):
        return 1 << 30


def planted(defects):
    return [pytest.param(mutant.make, id=mutant.name) for mutant in defects.mutants]


# These show in the first cells.
@pytest.mark.fast("[AHOPRS]l*", "Hid*", "One*", "Pre*", "Re[jtl]*", "Row*")
@pytest.mark.parametrize("make", planted(IN_ONE_ENGINE))
def test_a_planted_defect_is_noticed(make):
    with make.planted():
        assert noticed()


@pytest.mark.fast("BlocksK*")
@pytest.mark.parametrize("make", planted(BETWEEN))
def test_a_planted_difference_between_blocks_and_rounds_is_noticed(make):
    with make.planted():
        assert noticed(run_cell_in_multi_steps)


def test_without_a_defect_nothing_is_noticed():
    assert not any(noticed_in(cell) for cell in cells()[:10])
