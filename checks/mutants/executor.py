"""Planted defects of executors: each is one method of a good one, done wrong in a way that has been done wrong before.

Those of the simulated and the real executor are in files of their own, and count only if simpy or torch is installed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from ...core.contract.future_map import FutureMap, RelayField
from ...core.contract.step import PADDING_ROW
from ...properties.executor.reference import ReferenceExecutor
from ...properties.executor.reference.adapter import ReferenceAdapter
from ...properties.executor.reference.drafting import ReferenceDrafter
from ...properties.executor.reference.language_model import HIDDEN_SIZE, hidden_of
from ...properties.executor.reference.passes import ReferencePasses
from ...properties.executor.reference.shadow import ShadowStates
from .planting import defects, lookup

SIMULATED = REAL = ()
if find_spec("simpy") is not None:
    from .simulated_executor import MUTANTS as SIMULATED
if find_spec("torch") is not None:
    from .torch_executor import MUTANTS as REAL

REFERENCE = """
RelaysHiddenStatesAlways (ACCEPT-17): The relay has a hidden state for every algorithm; where there is none it relays zeros.
    ReferenceExecutor.__init__:
        good(self, engine, draft, acceptance=acceptance, fail_at=fail_at, recurrent=recurrent)
        fields = [field for field in self.future_map.fields if field.name != "hidden_states"]
        fields.append(RelayField("hidden_states", (HIDDEN_SIZE,), "float32"))
        self.future_map = FutureMap(engine.config.max_running, fields, debug_poison=True)
        self.passes.future_map = self.future_map
    ReferencePasses._relay:
        if hidden is None:
            own = {**own, "hidden_states": np.zeros((len(rows), HIDDEN_SIZE), np.float32)}
        good(self, states, rows, last_hashes, tokens, hidden, own)

AllocatesForTheWidestAlgorithm (ACCEPT-17): The draft's input buffers are allocated once, for any algorithm.
    ReferenceExecutor.__init__:
        good(self, engine, draft, acceptance=acceptance, fail_at=fail_at, recurrent=recurrent)
        self.draft_inputs = {"hidden": np.zeros((engine.config.max_running + 1, HIDDEN_SIZE), np.float32)}

CapturesInVerify (ACCEPT-17): The verify pass keeps its hidden states until the next one, for every algorithm.
    ReferencePasses._verify:
        self.captured = hidden_of(hashes.ravel())
        return good(self, states, request, drafted, hashes, windows)

ShowsHiddenStatesToAll (ACCEPT-17, ANSWER): A result carries hidden states that no request asked for.
    ReferenceExecutor._result:
        result = good(self, running)
        if result.decode is None:
            return result
        width = result.decode.tokens.shape[2]
        shown = {"hidden_states": np.zeros((len(result.decode.ended), width, HIDDEN_SIZE), np.float32)}
        outputs = tuple({**outputs, **shown} for outputs in result.decode.outputs)
        return replace(result, decode=replace(result.decode, outputs=outputs))

MergesNoneAsZeros (ACCEPT-17): A batch without hidden states is filled up with zeros when it is merged with one that has some.
    ReferenceAdapter.merge:
        zeros = None if first is second is None else [[0.0] * HIDDEN_SIZE]
        return good(self, zeros if first is None else first, zeros if second is None else second)

MergesNothingToAnEmptyArray (ACCEPT-17): Two batches without hidden states make one with an empty array.
    ReferenceAdapter.merge:
        merged = good(self, first, second)
        return np.zeros((0, HIDDEN_SIZE), np.float32) if merged is None else merged

TakesWhatWasSent (ACCEPT-17, ANSWER): The executor takes the hidden states that a prefill worker sends, whatever the draft is.
    ReferenceAdapter.draft_input:
        answer = good(self, batch, last_tokens)
        states = [state for state in batch.hidden_states if state is not None]
        return replace(answer, hidden_states=np.stack(states)) if answer is not None and states else answer

FillsUpWhatWasNotSent (ACCEPT-17): A request that comes without a hidden state gets one of zeros.
    ReferenceAdapter.draft_input:
        zeros = np.zeros(batch.hidden_size, np.float32)
        states = tuple(zeros if state is None else state for state in batch.hidden_states)
        return good(self, replace(batch, hidden_states=states), last_tokens)

ShowsNothing (ACCEPT-17): The executor declares that its state can be inspected, and shows none of it.
    ReferenceAdapter.roots = ()

PadsTheStepInPlace (SIM-04): Rows whose request has ended become padding: in the step's own array, which the engine reads, too.
    ReferenceExecutor._result
        - ends = (
        + if decode is not None:
        +     step.decode.rows[decode.ended] = PADDING_ROW
        + ends = (

ReversesTheStepInPlace (SIM-04): A step's rows are turned round where they stand: a kernel runs the last one first.
    ReferenceExecutor._result
        - ends = (
        + if decode is not None:
        +     step.decode.rows[:] = step.decode.rows[::-1].copy()
        + ends = (

IgnoresTheCertificate (ANSWER, RAISES): A step runs one round more than it was certified for.
    ReferenceExecutor._start
        - return running
        + running.limit += 1
        + return running

IgnoresStops (ANSWER): A block runs to its end, although a stop was asked for.
    ReferenceExecutor.request_stop = None

RunsPastAnEnd (ANSWER, RAISES): A block goes on after a request has ended in it.
    ReferenceExecutor._is_over = running.step.decode is None or running.decoded.rounds >= running.limit

CountsCorrectDrafts (ANSWER): accept_lens are the correct drafts, without the bonus token.
    ReferenceExecutor._settle
        - accept_lens.astype(np.int32), stops
        + accept_lens.astype(np.int32) - 1, stops

AnswersInRowsOfRequests (TYPE): Columns are [bs, rounds] instead of [rounds, bs].
    ReferenceExecutor._result
        - ends = (
        + if decode is not None:
        +     decode = replace(decode, accept_lens=decode.accept_lens.T)
        + ends = (

LeavesDraftsPastTheEnd (ANSWER): Tokens past the accepted run are what the buffer held before, not −1.
    ReferenceExecutor._result
        - ends = (
        + if decode is not None:
        +     decode = replace(decode, tokens=np.maximum(decode.tokens, 0))
        + ends = (

StopsOneTokenLate (ANSWER): stop_index is the place behind the stop.
    ReferenceExecutor._settle
        - running.decoded.add(accept_lens.astype(np.int32), stops,
        + running.decoded.add(accept_lens.astype(np.int32), np.where(stops >= 0, stops + 1, -1).astype(np.int32),

AnswersTheNewestStep (ANSWER): A result has the id of the step that was launched last.
    ReferenceExecutor._result
        - StepResult(step.step_id,
        + StepResult(self._last_step_id,

ForgetsTheEnded (ANSWER): Only a stop ends a request; one that has reached its length goes on.
    ReferenceExecutor._settle:
        for state in states:
            state.remaining += int(accept_lens.max())
        good(self, running, states, was_over, final, accept_lens)

DeliversThePlaceholder (ANSWER): The first token of a prompt is read before it is there: −1.
    ReferenceExecutor._prefill
        - PrefillResult(tokens,
        + PrefillResult(np.full_like(tokens, -1),

DraftsFromTheLastCandidate (ANSWER): A draft starts from the last relayed candidate instead of the first: it loses no token, and most of
its drafts.
    ReferenceDrafter._model_tree:
        turned = {name: request.relayed[name][:, ::-1] for name in ("topk_ids", "topk_probabilities")}
        return good(self, replace(request, relayed=request.relayed | turned))

KeepsTheLastNode (STATE-01, RAISES): A state takes in the path to the last node of a tree, whichever was accepted.
    ShadowStates.keep
        - self.hashes[rows] = hashes.ravel()[last]
        + self.hashes[rows] = hashes[:, -1]

GoesOnFromItsPredecessor (STATE-02, ANSWER): A request goes on from the state of the one that had its row before.
    ShadowStates.run_chunk
        - int(self.hashes[row]) if start else empty
        + int(self.hashes[row]) if start or self.lengths[row] else empty

StartsEveryChunkFresh (STATE-02, ANSWER): Each chunk of a prompt begins from the empty state.
    ShadowStates.run_chunk
        - int(self.hashes[row]) if start else empty
        + empty

ForgetsWhatRests (STATE-03): Only the states of a step's own rows stay on the device.
    ReferenceExecutor._result:
        if self.states is not None:
            parts = [part.rows for part in (running.step.prefill, running.step.decode) if part is not None]
            self.states.hashes[np.setdiff1d(np.arange(len(self.states.hashes)), np.concatenate(parts))] = 0
        return good(self, running)

MixesTheArrivalsUp (ANSWER): The first tokens of requests that arrive together are those of their neighbours.
    ReferenceAdapter.draft_input:
        answer = good(self, batch, last_tokens)
        return answer and replace(answer, bonus_tokens=answer.bonus_tokens[::-1])
"""

_PLACES = [
    *(ReferenceExecutor, ReferencePasses, ReferenceAdapter, ReferenceDrafter),
    *(FutureMap, RelayField, ShadowStates, replace, hidden_of),
]
_CONSTANTS = {"np": np, "HIDDEN_SIZE": HIDDEN_SIZE, "PADDING_ROW": PADDING_ROW}
MUTANTS = (*defects("executor", ReferenceAdapter, _PLACES, REFERENCE, **_CONSTANTS), *SIMULATED, *REAL)
__getattr__ = lookup(MUTANTS)
