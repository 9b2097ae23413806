"""Planted defects of executors: each is one method of a good one, done wrong in a way that has been done wrong before.

Those of the simulated and the real executor are in files of their own, and count only if simpy or torch is installed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from ...core.contract.future_map import FutureMap, RelayField
from ...core.contract.step import NO_TOKEN, PADDING_ROW
from ...properties.harness.mutants import Mutant
from ...properties.reference import ReferenceExecutor
from ...properties.reference.drafting import ReferenceDrafter
from ...properties.reference.language_model import HIDDEN_SIZE, hidden_of
from ..executor.contract import HIDDEN_STATES
from ..executor.reference_subject import ReferenceAdapter

SIMULATED = REAL = ()
if find_spec("simpy") is not None:
    from .simulated_executor import MUTANTS as SIMULATED
if find_spec("torch") is not None:
    from .torch_executor import MUTANTS as REAL

# -- hidden states where none are needed ------------------------------------------------------------------------------


class RelaysHiddenStatesAlways(ReferenceExecutor):
    """The relay has a hidden state for every algorithm; where there is none it relays zeros."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        fields = [field for field in self.future_map.fields if field.name != HIDDEN_STATES]
        fields.append(RelayField(HIDDEN_STATES, (HIDDEN_SIZE,), "float32"))
        self.future_map = FutureMap(arguments["num_rows"], fields, debug_poison=True)

    def _relay(self, rows, epochs, last_hashes, tokens, hidden, own):
        if hidden is None:
            own = {**own, HIDDEN_STATES: np.zeros((len(rows), HIDDEN_SIZE), np.float32)}
        super()._relay(rows, epochs, last_hashes, tokens, hidden, own)


class AllocatesForTheWidestAlgorithm(ReferenceExecutor):
    """The draft's input buffers are allocated once, for any algorithm."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.draft_inputs = {"hidden": np.zeros((arguments["num_rows"] + 1, HIDDEN_SIZE), np.float32)}


class CapturesInVerify(ReferenceExecutor):
    """The verify pass keeps its hidden states until the next one, for every algorithm."""

    def _verify(self, states, request, drafted, hashes, windows):
        self.captured = hidden_of(hashes.ravel())
        return super()._verify(states, request, drafted, hashes, windows)


class CapturesInPrefill(ReferenceExecutor):
    """The capture mode of a prefill is FULL for all."""

    def _first_token(self, state, prefix):
        self.last_hidden = hidden_of(prefix.hashes[-1:])
        return super()._first_token(state, prefix)


class ShowsHiddenStatesToAll(ReferenceExecutor):
    """A result carries hidden states that no request asked for."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is None:
            return result
        width = result.decode.tokens.shape[2]
        shown = {HIDDEN_STATES: np.zeros((len(result.decode.ended), width, HIDDEN_SIZE), np.float32)}
        outputs = tuple({**outputs, **shown} for outputs in result.decode.outputs)
        return replace(result, decode=replace(result.decode, outputs=outputs))


class MergesNoneAsZeros(ReferenceAdapter):
    """A batch without hidden states is filled up with zeros where it meets one that has some."""

    def merge(self, first, second):
        first, second = (
            [[0.0] * HIDDEN_SIZE] if one is None and other is not None else one
            for one, other in ((first, second), (second, first))
        )
        return super().merge(first, second)


class MergesWhatThereIs(ReferenceAdapter):
    """Of two batches the one that has hidden states is taken for both."""

    def merge(self, first, second):
        return super().merge(first, second) if first is not None and second is not None else first or second


class MergesNothingToAnEmptyArray(ReferenceAdapter):
    """Two batches without hidden states make one with an empty array."""

    def merge(self, first, second):
        merged = super().merge(first, second)
        return np.zeros((0, HIDDEN_SIZE), np.float32) if merged is None else merged


class TakesWhatWasSent(ReferenceAdapter):
    """Hidden states that a prefill worker sends are taken, whatever the draft is."""

    def draft_input(self, batch, last_tokens):
        answer = super().draft_input(batch, last_tokens)
        states = [state for state in batch.hidden_states if state is not None]
        return replace(answer, hidden_states=np.stack(states)) if answer is not None and states else answer


class FillsUpWhatWasNotSent(ReferenceAdapter):
    """A request that comes without a hidden state gets one of zeros."""

    def draft_input(self, batch, last_tokens):
        zeros = np.zeros(batch.hidden_size, np.float32)
        states = tuple(zeros if state is None else state for state in batch.hidden_states)
        return super().draft_input(replace(batch, hidden_states=states), last_tokens)


class ShowsNothing(ReferenceAdapter):
    """What it keeps is declared to be open to inspection, and is not shown."""

    def roots(self):
        return ()


# -- the record -------------------------------------------------------------------------------------------------------


class PadsTheStepInPlace(ReferenceExecutor):
    """Rows whose request has ended become padding: in the step's own array, which the engine reads, too."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is not None:
            running.step.decode.rows[result.decode.ended] = PADDING_ROW
        return result


class ReversesTheStepInPlace(ReferenceExecutor):
    """A step's rows are turned round where they stand: a kernel runs the last one first."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is not None:
            running.step.decode.rows[:] = running.step.decode.rows[::-1].copy()
        return result


# -- what a result says -----------------------------------------------------------------------------------------------


class IgnoresTheCertificate(ReferenceExecutor):
    """A step runs one round more than it was certified for."""

    def _start(self, step):
        running = super()._start(step)
        running.limit += 1
        return running


class IgnoresStops(ReferenceExecutor):
    """A block runs to its end, although a stop was asked for."""

    def request_stop(self, last_step_id):
        pass


class RunsPastAnEnd(ReferenceExecutor):
    """A block goes on after a request has ended in it."""

    def _is_over(self, running):
        return running.step.decode is None or running.decoded.rounds >= running.limit


class CountsCorrectDrafts(ReferenceExecutor):
    """accept_lens are the correct drafts, without the bonus token."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, accept_lens=result.decode.accept_lens - 1))


class AnswersInRowsOfRequests(ReferenceExecutor):
    """Columns are [bs, rounds] instead of [rounds, bs]."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, accept_lens=result.decode.accept_lens.T))


class LeavesDraftsPastTheEnd(ReferenceExecutor):
    """Tokens past the accepted run are what the buffer held before, not −1."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is None:
            return result
        return replace(result, decode=replace(result.decode, tokens=np.maximum(result.decode.tokens, 0)))


class StopsOneTokenLate(ReferenceExecutor):
    """stop_index is the place behind the stop."""

    def _result(self, running):
        result = super()._result(running)
        decode = result.decode
        if decode is None or decode.stop_index is None:
            return result
        late = np.where(decode.stop_index >= 0, decode.stop_index + 1, -1).astype(np.int32)
        return replace(result, decode=replace(decode, stop_index=late))


class AnswersTheNewestStep(ReferenceExecutor):
    """A result has the id of the step that was launched last."""

    def _result(self, running):
        return replace(super()._result(running), step_id=self._last_step_id)


class ForgetsTheEnded(ReferenceExecutor):
    """Only a stop ends a request; one that has reached its length goes on."""

    def _settle(self, running, states, was_over, final, accept_lens):
        for state in states:
            state.remaining += int(accept_lens.max())
        super()._settle(running, states, was_over, final, accept_lens)


class DeliversThePlaceholder(ReferenceExecutor):
    """The first token of a prompt is read before it is there: −1."""

    def _result(self, running):
        result = super()._result(running)
        if result.prefill is None:
            return result
        return replace(result, prefill=replace(result.prefill, tokens=np.full_like(result.prefill.tokens, NO_TOKEN)))


# -- how they are made ------------------------------------------------------------------------------------------------


class DraftsFromTheLastCandidate(ReferenceExecutor):
    """A draft starts from the last relayed candidate instead of the first: it loses no token, and most of its drafts."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.drafter.__class__ = _FromTheLast


class _FromTheLast(ReferenceDrafter):
    def _model_tree(self, request):
        turned = {name: request.relayed[name][:, ::-1] for name in ("topk_ids", "topk_probabilities")}
        return super()._model_tree(replace(request, relayed=request.relayed | turned))


class MixesTheArrivalsUp(ReferenceAdapter):
    """The first tokens of requests that arrive together are those of their neighbours."""

    def draft_input(self, batch, last_tokens):
        answer = super().draft_input(batch, last_tokens)
        return answer and replace(answer, bonus_tokens=answer.bonus_tokens[::-1])


def of_reference(kind: type[ReferenceExecutor]) -> type[ReferenceAdapter]:
    return type(kind.__name__, (ReferenceAdapter,), {"executor_type": kind})


_DEFECTS = (
    (of_reference(RelaysHiddenStatesAlways), RelaysHiddenStatesAlways, ("ACCEPT-17",)),
    (of_reference(AllocatesForTheWidestAlgorithm), AllocatesForTheWidestAlgorithm, ("ACCEPT-17",)),
    (of_reference(CapturesInVerify), CapturesInVerify, ("ACCEPT-17",)),
    (of_reference(CapturesInPrefill), CapturesInPrefill, ("ACCEPT-17",)),
    (of_reference(ShowsHiddenStatesToAll), ShowsHiddenStatesToAll, ("ACCEPT-17",)),
    (MergesNoneAsZeros, MergesNoneAsZeros, ("ACCEPT-17",)),
    (MergesWhatThereIs, MergesWhatThereIs, ("ACCEPT-17",)),
    (MergesNothingToAnEmptyArray, MergesNothingToAnEmptyArray, ("ACCEPT-17",)),
    (TakesWhatWasSent, TakesWhatWasSent, ("ACCEPT-17",)),
    (FillsUpWhatWasNotSent, FillsUpWhatWasNotSent, ("ACCEPT-17",)),
    (ShowsNothing, ShowsNothing, ("ACCEPT-17",)),
    (of_reference(PadsTheStepInPlace), PadsTheStepInPlace, ("SIM-04",)),
    (of_reference(ReversesTheStepInPlace), ReversesTheStepInPlace, ("SIM-04",)),
    (of_reference(IgnoresTheCertificate), IgnoresTheCertificate, ("ANSWER", "RAISES")),
    (of_reference(IgnoresStops), IgnoresStops, ("ANSWER",)),
    (of_reference(RunsPastAnEnd), RunsPastAnEnd, ("ANSWER", "RAISES")),
    (of_reference(CountsCorrectDrafts), CountsCorrectDrafts, ("ANSWER",)),
    (of_reference(AnswersInRowsOfRequests), AnswersInRowsOfRequests, ("TYPE",)),
    (of_reference(LeavesDraftsPastTheEnd), LeavesDraftsPastTheEnd, ("ANSWER",)),
    (of_reference(StopsOneTokenLate), StopsOneTokenLate, ("ANSWER",)),
    (of_reference(AnswersTheNewestStep), AnswersTheNewestStep, ("ANSWER",)),
    (of_reference(ForgetsTheEnded), ForgetsTheEnded, ("ANSWER",)),
    (of_reference(DeliversThePlaceholder), DeliversThePlaceholder, ("ANSWER",)),
    (of_reference(DraftsFromTheLastCandidate), DraftsFromTheLastCandidate, ("ANSWER",)),
    (MixesTheArrivalsUp, MixesTheArrivalsUp, ("ANSWER",)),
)
"""(how it is made, the class with the defect, the invariants of which one must catch it)."""

MUTANTS = (
    *(Mutant(kind.__name__, kind.__doc__, "executor", make, caught_by) for make, kind, caught_by in _DEFECTS),
    *SIMULATED,
    *REAL,
)
