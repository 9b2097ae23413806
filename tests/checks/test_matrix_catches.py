"""Planted defects, in the engine and in the executor: the pairwise cover must notice each of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from foredraft.checks.cells import MatrixCell, pairwise_cells, random_cell
from foredraft.checks.driver import Dice
from foredraft.checks.matrix import run_cell, run_cell_in_multi_steps
from foredraft.checks.mutants.planting import defects
from foredraft.core.adaptive import AdaptiveController
from foredraft.core.algorithm.builtin import Eagle
from foredraft.core.contract.future_map import FutureMap
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
from foredraft.properties.executor.reference import drafting, language_model, shadow
from foredraft.properties.executor.reference.executor import ReferenceExecutor
from foredraft.properties.executor.reference.passes import ReferencePasses

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


IN_ONE_ENGINE = """
SlotsFreedUnderAStepInFlight (MATRIX): No step in flight is found that touches a row.
    StepsInFlight.fence_of = 0

ReserveOfOneRoundInOverlapMode (MATRIX): A round in flight behind another has no slots of its own.
    config.reserve_per_decode = alloc_len

AllocationForOneStepLessThanTheMaximum (MATRIX): The deepest round has a slot too few.
    config.get_alloc_len_per_decode = max(1, good(steps, topk, num_draft_tokens, page_size, has_draft_kv) - 1)

TokenKeysWhereBigramsAreNeeded (MATRIX): A draft head's prefix is found by its own tokens.
    Eagle.prefix_key_kind = "token"

CapturesLeftUncompacted (MATRIX): Outputs stay where their nodes were.
    NodeOutputs.compact = self

AcceptedPathNotMoved (MATRIX): KV stays where its nodes were.
    ShadowPool.move = None

BranchesDoNotFollowTheirParents (MATRIX): A branch reads what its neighbour has written.
    _Branches._follow = None

HiddenStatesInStandalone (MATRIX): Hidden states are captured for a draft that reads none.
    ReferencePasses._draft_hidden = hidden_of(hashes)

RejectedPositionsCached (MATRIX): Positions behind the end of a request are handed to the cache.
    KVStore.close_row:
        tokens = None if departure.tokens is None else np.append(departure.tokens, [7, 7, 7, 7])
        good(self, departure._replace(tokens=tokens, num_valid=departure.num_valid + 4), last_committed)

RowNotPointedAtTheCanonicalSlots (MATRIX): A row goes on reading its own copies of a cached prefix.
    KVStore.share_prefix
        - self._write(row, old_shared, insertion.canonical[old_shared:])
        + pass

NamespacesIgnored (MATRIX): The namespace is no part of the key.
    KVStore.match = good(self, tokens, "")
    KVStore._release = good(self, departure._replace(namespace=""))

RetractedRequestsForgetTheirOutput (MATRIX): What was delivered before a retraction is not counted.
    OutputLog.close:
        good(self, record)
        record.emitted_before = 0

DepartedRowsSettled (MATRIX): Rows that have left are counted as if they were there.
    DecodeRounds.count = good(self, planned, result, self.num_departed, ())

StopMaskedByTheLengthCap (MATRIX): A stop in the last place ends by length.
    rounds.cut_runs:
        runs = good(accept_lens, stop_index, remaining)
        return runs._replace(stopped=runs.stopped & (runs.kept < remaining))

OneTokenPastTheCap (MATRIX): A request ends one token late.
    Requests.begin_decoding:
        good(self, record)
        self.rounds.end_len[record.row] += 1

PreemptedAfterItsSlotsWereReserved (MATRIX): A request is retracted that the step has planned.
    Admission.plan_prefill:
        requests = self.requests
        if self.config.mixed and len(requests.running) > 1 and len(requests.waiting) and requests.last_step_id % 5 == 0:
            requests.retract(least_entitled(requests.running.values()))
        return good(self, num_verify_tokens)

MovesScatteredBeforeGathered (MATRIX): A source has been overwritten when it is read.
    shadow.apply_moves:
        for src, dst in zip(plan.src[::-1], plan.dst[::-1], strict=True):
            pool[dst] = pool[src]

NoCatchUpWhenAllIsAccepted (MATRIX): The draft's KV of a last draft that is accepted is not written.
    ShadowKV.write_draft:
        end = -1 if len(tokens) > 2 else None
        good(self, row, start, tokens[:end], hashes[:end], next_token)

ChunkTailTakenFromTheSample (MATRIX): The token behind a chunk is the sampled one, not the prompt's.
    ReferencePasses.draft_prompt:
        token = int(self.model.argmax(prefix.hashes[-1:], prefix.tokens[-1:])[0])
        good(self, row, start, prefix, token)

BonusGatheredWithTheWrongStride (MATRIX): The bonus token is read with a stride of one lane less.
    outputs.gather_last:
        rows, width = emitted.shape
        places = np.arange(rows) * max(width - 1, 1) + accept_lens - 1
        return np.maximum(emitted.reshape(-1)[places], 0)

ReleasedCellsKept (MATRIX): The relay cell of a row that is released keeps its value.
    FutureMap.drop = None

FeedbackOfDepartedRowsCounted (MATRIX): The controller is told of rows that have left.
    DecodeRounds.teach_controller = good(self, step, result, present._replace(is_complete=True))

FailedRequestsGoOn (MATRIX): What the executor reports as failed is not looked at.
    Engine.commit = good(self, replace(result, failures=()), now_ns)
"""

BETWEEN_BLOCKS_AND_SINGLE_ROUNDS = """
AStopThatNeverArrives (MATRIX): A block runs to its end.
    ReferenceExecutor.request_stop = None

BlocksKeepWhatTheyReserved (MATRIX): What a block has not used stays with its rows.
    DecodeRounds.release_unused = None

NewcomersNeverWakeTheDriver (MATRIX): A newcomer waits for the end of the block.
    Admission.could_enter_before_commit = False

AbortedRoundsForgotten (MATRIX): A request that is aborted in a block ends at once.
    StepsInFlight.runs_multi_step_of = False

BlocksPlannedWhileARequestCouldEnter (MATRIX): The queue is not looked at before a block.
    Engine._max_rounds
        - or self.admission.head_could_enter_soon()

TheControllerIsNotAskedHowLong (MATRIX): A block goes on where the step count may change.
    AdaptiveController.rounds_to_next_decision = 1 << 30
"""

PLACES = [
    *(config, rounds, shadow, outputs, AdaptiveController, Admission, DecodeRounds, Eagle, Engine, FutureMap, KVStore),
    *(
        NodeOutputs,
        OutputLog,
        ReferenceExecutor,
        ReferencePasses,
        Requests,
        StepsInFlight,
        shadow.ShadowKV,
        shadow.ShadowPool,
        drafting._Branches,
    ),
    *(language_model.hidden_of, least_entitled, replace),
]


def planted(text):
    return [pytest.param(mutant.make, id=mutant.name) for mutant in defects("engine", None, PLACES, text, np=np)]


# These show in the first cells.
@pytest.mark.fast("[AHOPRS]l*", "Hid*", "One*", "Pre*", "Re[jtl]*", "Row*")
@pytest.mark.parametrize("make", planted(IN_ONE_ENGINE))
def test_a_planted_defect_is_noticed(make):
    with make.planted():
        assert noticed()


@pytest.mark.fast("BlocksK*")
@pytest.mark.parametrize("make", planted(BETWEEN_BLOCKS_AND_SINGLE_ROUNDS))
def test_a_planted_difference_between_blocks_and_rounds_is_noticed(make):
    with make.planted():
        assert noticed(run_cell_in_multi_steps)


def test_without_a_defect_nothing_is_noticed():
    assert not any(noticed_in(cell) for cell in cells()[:10])
