"""Planted defects of executors: each is a subclass of a part of a good one, done wrong as has happened before.

Those of the simulated and the real executor are in files of their own, and count only if simpy or torch is installed.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from ...core.contract.future_map import FutureMap, RelayField
from ...core.contract.step import PADDING_ROW
from ...core.kv.radix import RadixCache
from ...core.scheduler.preemption import Preemption
from ...properties.executor.reference import ReferenceExecutor
from ...properties.executor.reference.adapter import ReferenceAdapter
from ...properties.executor.reference.drafting import ReferenceDrafter
from ...properties.executor.reference.language_model import HIDDEN_SIZE, hidden_of
from ...properties.executor.reference.passes import ReferencePasses
from ...properties.executor.reference.shadow import ShadowStates
from .planting import Defects

SIMULATED = REAL = ()
if find_spec("simpy") is not None:
    from .simulated_executor import MUTANTS as SIMULATED
if find_spec("torch") is not None:
    from .torch_executor import MUTANTS as REAL

REFERENCE = Defects("executor", ReferenceAdapter)


def _with_rounds(result, change):
    """Return a result with the decode rounds that `change` makes of its own."""
    return result if result.decode is None else replace(result, decode=change(result.decode))


class _HasARelayOfStates(ReferenceExecutor):
    def __init__(self, engine, draft, **options):
        super().__init__(engine, draft, **options)
        fields = [field for field in self.future_map.fields if field.name != "hidden_states"]
        fields.append(RelayField("hidden_states", (HIDDEN_SIZE,), "float32"))
        self.future_map = FutureMap(engine.config.max_running, fields, debug_poison=True)
        self.passes.future_map = self.future_map


@REFERENCE.breaks("ACCEPT-17", also=(_HasARelayOfStates,))
class RelaysHiddenStatesAlways(ReferencePasses):
    """The relay has a hidden state for every algorithm; where there is none it relays zeros."""

    def _relay(self, states, rows, last_hashes, tokens, hidden, own, *rest):
        if hidden is None:
            own = {**own, "hidden_states": np.zeros((len(rows), HIDDEN_SIZE), np.float32)}
        super()._relay(states, rows, last_hashes, tokens, hidden, own, *rest)


@REFERENCE.breaks("ACCEPT-17")
class AllocatesForTheWidestAlgorithm(ReferenceExecutor):
    """The draft's input buffers are allocated once, for any algorithm."""

    def __init__(self, engine, draft, **options):
        super().__init__(engine, draft, **options)
        self.draft_inputs = {"hidden": np.zeros((engine.config.max_running + 1, HIDDEN_SIZE), np.float32)}


@REFERENCE.breaks("ACCEPT-17")
class CapturesInVerify(ReferencePasses):
    """The verify pass keeps its hidden states until the next one, for every algorithm."""

    def _verify(self, states, request, drafted, hashes, windows):
        self.captured = hidden_of(hashes.ravel())
        return super()._verify(states, request, drafted, hashes, windows)


@REFERENCE.breaks("ACCEPT-17", "ANSWER")
class ShowsHiddenStatesToAll(ReferenceExecutor):
    """A result carries hidden states that no request asked for."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is None:
            return result
        width = result.decode.tokens.shape[2]
        shown = {"hidden_states": np.zeros((len(result.decode.ended), width, HIDDEN_SIZE), np.float32)}
        outputs = tuple({**outputs, **shown} for outputs in result.decode.outputs)
        return replace(result, decode=replace(result.decode, outputs=outputs))


@REFERENCE.breaks("ACCEPT-17")
class MergesNoneAsZeros(ReferenceAdapter):
    """A batch without hidden states is filled up with zeros when it is merged with one that has some."""

    def merge(self, first, second):
        zeros = None if first is second is None else [[0.0] * HIDDEN_SIZE]
        return super().merge(zeros if first is None else first, zeros if second is None else second)


@REFERENCE.breaks("ACCEPT-17")
class MergesNothingToAnEmptyArray(ReferenceAdapter):
    """Two batches without hidden states make one with an empty array."""

    def merge(self, first, second):
        merged = super().merge(first, second)
        return np.zeros((0, HIDDEN_SIZE), np.float32) if merged is None else merged


@REFERENCE.breaks("ACCEPT-17", "ANSWER")
class TakesWhatWasSent(ReferenceAdapter):
    """The executor takes the hidden states that a prefill worker sends, whatever the draft is."""

    def draft_input(self, batch, last_tokens):
        answer = super().draft_input(batch, last_tokens)
        states = [state for state in batch.hidden_states if state is not None]
        return replace(answer, hidden_states=np.stack(states)) if answer is not None and states else answer


@REFERENCE.breaks("ACCEPT-17")
class FillsUpWhatWasNotSent(ReferenceAdapter):
    """A request that comes without a hidden state gets one of zeros."""

    def draft_input(self, batch, last_tokens):
        zeros = np.zeros(batch.hidden_size, np.float32)
        states = tuple(zeros if state is None else state for state in batch.hidden_states)
        return super().draft_input(replace(batch, hidden_states=states), last_tokens)


@REFERENCE.breaks("ACCEPT-17")
class ShowsNothing(ReferenceAdapter):
    """The executor declares that its state can be inspected, and shows none of it."""

    def roots(self):
        return ()


@REFERENCE.breaks("DRAFT-01")
class ForgetsDraftKVOfLoneRoots(ReferencePasses):
    """A row that verifies its root alone gets no catch-up, and its next drafts come from stale KV."""

    def _shortened(self, part, drafted):
        stale = self.__dict__.setdefault("stale", set())
        owners = list(zip(part.rows.tolist(), part.epochs.tolist(), strict=True))
        tokens = drafted.tree.tokens.reshape(len(owners), -1).copy()
        for i, owner in enumerate(owners):
            if owner in stale:
                tokens[i, 1:] = (tokens[i, 1:] + 1) % self.model.vocab_size
        nodes = [part.shape.nodes] * len(owners) if part.row_nodes is None else part.row_nodes.tolist()
        lone = {owner for owner, count in zip(owners, nodes, strict=True) if count == 1 < part.shape.nodes}
        stale.difference_update(owners)
        stale.update(lone)
        return super()._shortened(part, replace(drafted, tree=replace(drafted.tree, tokens=tokens.reshape(-1))))


@REFERENCE.breaks("ACCEPT-02", "ANSWER")
class VerifiesAllNodesAlways(ReferencePasses):
    """The rows of a round verify as many nodes as the longest one."""

    def _shortened(self, part, drafted):
        return drafted


@REFERENCE.breaks("DRAFT-02")
class RoundsTheBudgetUp(ReferencePasses):
    """The pass is padded to a captured size, and the padding is spent on drafts."""

    def _chosen(self, part, drafted):
        if part.budget is None:
            return None
        padded = replace(part.budget, drafts=-(-part.budget.drafts // 4) * 4)
        return super()._chosen(replace(part, budget=padded), drafted)


@REFERENCE.breaks("DRAFT-03", "RAISES")
class SpendsTheBudgetOnAnyRow(ReferencePasses):
    """Drafts are chosen over the whole width of the round: a row's own bound is forgotten."""

    def _chosen(self, part, drafted):
        return super()._chosen(replace(part, row_nodes=None), drafted)


@REFERENCE.breaks("DRAFT-04")
class BreaksTiesByRow(ReferencePasses):
    """Among drafts of equal survival the first row takes all."""

    def _chosen(self, part, drafted):
        chosen = super()._chosen(part, drafted)
        if chosen is None or part.budget.slope:
            return chosen
        left, nodes = part.budget.drafts, []
        for most in [part.shape.nodes] * len(part.rows) if part.row_nodes is None else part.row_nodes.tolist():
            nodes.append(1 + min(most - 1, left))
            left -= nodes[-1] - 1
        return chosen._replace(row_nodes=np.array(nodes, np.int32))


@REFERENCE.breaks("DRAFT-04")
class SharesTheBudgetAlike(ReferencePasses):
    """Every row verifies as many drafts as every other one, whatever its confidences are."""

    def _chosen(self, part, drafted):
        chosen = super()._chosen(part, drafted)
        same = None if chosen is None else replace(drafted, confidence=np.full_like(chosen.confidence, 0.5))
        return chosen and chosen._replace(row_nodes=super()._chosen(part, same).row_nodes)


@REFERENCE.breaks("DRAFT-05")
class KeepsConfidencesByRow(ReferencePasses):
    """The confidences of a round are those that the row had in the round before, also if it was another request's."""

    def _chosen(self, part, drafted):
        if part.budget is None:
            return None
        kept, now = self.__dict__.setdefault("kept", {}), drafted.confidence
        stale = np.stack([kept.get((row, now.shape[1]), own) for row, own in zip(part.rows.tolist(), now, strict=True)])
        kept.update({(row, now.shape[1]): own for row, own in zip(part.rows.tolist(), now, strict=True)})
        return super()._chosen(part, replace(drafted, confidence=stale))


@REFERENCE.breaks("SIM-04")
class PadsTheStepInPlace(ReferenceExecutor):
    """Rows whose request has ended become padding: in the step's own array, which the engine reads, too."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is not None:
            running.step.decode.rows[result.decode.ended] = PADDING_ROW
        return result


@REFERENCE.breaks("SIM-04")
class ReversesTheStepInPlace(ReferenceExecutor):
    """A step's rows are turned round where they stand: a kernel runs the last one first."""

    def _result(self, running):
        result = super()._result(running)
        if result.decode is not None:
            running.step.decode.rows[:] = running.step.decode.rows[::-1].copy()
        return result


@REFERENCE.breaks("ANSWER", "RAISES")
class IgnoresTheCertificate(ReferenceExecutor):
    """A step runs one round more than it was certified for."""

    def _start(self, step):
        running = super()._start(step)
        running.limit += 1
        return running


@REFERENCE.breaks("ANSWER")
class IgnoresStops(ReferenceExecutor):
    """A block runs to its end, although a stop was asked for."""

    def request_stop(self, last_step_id):
        pass


@REFERENCE.breaks("ANSWER", "RAISES")
class RunsPastAnEnd(ReferenceExecutor):
    """A block goes on after a request has ended in it."""

    def _is_over(self, running):
        return running.step.decode is None or running.decoded.rounds >= running.limit


@REFERENCE.breaks("ANSWER")
class CountsCorrectDrafts(ReferenceExecutor):
    """accept_lens are the correct drafts, without the bonus token."""

    def _result(self, running):
        return _with_rounds(
            super()._result(running), lambda decode: replace(decode, accept_lens=decode.accept_lens - 1)
        )


@REFERENCE.breaks("TYPE")
class AnswersInRowsOfRequests(ReferenceExecutor):
    """Columns are [bs, rounds] instead of [rounds, bs]."""

    def _result(self, running):
        return _with_rounds(super()._result(running), lambda decode: replace(decode, accept_lens=decode.accept_lens.T))


@REFERENCE.breaks("ANSWER")
class LeavesDraftsPastTheEnd(ReferenceExecutor):
    """Tokens past the accepted run are what the buffer held before, not −1."""

    def _result(self, running):
        return _with_rounds(
            super()._result(running), lambda decode: replace(decode, tokens=np.maximum(decode.tokens, 0))
        )


@REFERENCE.breaks("ANSWER")
class StopsOneTokenLate(ReferenceExecutor):
    """stop_index is the place behind the stop."""

    def _result(self, running):
        return _with_rounds(super()._result(running), self._late)

    @staticmethod
    def _late(decode):
        stops = decode.stop_index
        return decode if stops is None else replace(decode, stop_index=np.where(stops >= 0, stops + 1, stops))


@REFERENCE.breaks("ANSWER")
class AnswersTheNewestStep(ReferenceExecutor):
    """A result has the id of the step that was launched last."""

    def _result(self, running):
        return replace(super()._result(running), step_id=self._last_step_id)


@REFERENCE.breaks("ANSWER")
class ForgetsTheEnded(ReferenceExecutor):
    """Only a stop ends a request; one that has reached its length goes on."""

    def _settle(self, running, states, was_over, final, accept_lens, chosen):
        for state in states:
            state.remaining += int(accept_lens.max())
        super()._settle(running, states, was_over, final, accept_lens, chosen)


@REFERENCE.breaks("ANSWER")
class DeliversThePlaceholder(ReferenceExecutor):
    """The first token of a prompt is read before it is there: −1."""

    def _prefill(self, part, running):
        result = super()._prefill(part, running)
        return replace(result, tokens=np.full_like(result.tokens, -1))


@REFERENCE.breaks("RAISES", "ANSWER")
class ReturnsInTheMiddle(Preemption):
    """A parked draft returns while requests run, whose contexts it has not computed."""

    def return_draft(self, parking):
        if parking.is_returning:
            parking.returned()


@REFERENCE.breaks("RAISES", "ANSWER")
class FindsWhatAParkedDraftLeft(RadixCache):
    """The prefix cache still finds what was computed while the draft was parked."""

    def begin_generation(self):
        pass


@REFERENCE.breaks("ANSWER")
class DraftsFromTheLastCandidate(ReferenceDrafter):
    """A draft starts from the last relayed candidate instead of the first: it loses no token,
    and most of its drafts."""

    def _model_tree(self, request):
        turned = {name: request.relayed[name][:, ::-1] for name in ("topk_ids", "topk_probabilities")}
        return super()._model_tree(replace(request, relayed=request.relayed | turned))


@REFERENCE.breaks("STATE-01", "RAISES")
class KeepsTheLastNode(ShadowStates):
    """A state takes in the path to the last node of a tree, whichever was accepted."""

    def keep(self, rows, hashes, accept_index, accept_lens):
        super().keep(rows, hashes, accept_index, accept_lens)
        self.hashes[rows] = hashes[:, -1]


@REFERENCE.breaks("STATE-02", "ANSWER")
class GoesOnFromItsPredecessor(ShadowStates):
    """A request goes on from the state of the one that had its row before."""

    def run_chunk(self, row, empty, start, tokens):
        return super().run_chunk(row, int(self.hashes[row]) if self.lengths[row] else empty, start, tokens)


@REFERENCE.breaks("STATE-02", "ANSWER")
class StartsEveryChunkFresh(ShadowStates):
    """Each chunk of a prompt begins from the empty state."""

    def run_chunk(self, row, empty, start, tokens):
        self.hashes[row] = empty
        return super().run_chunk(row, empty, start, tokens)


@REFERENCE.breaks("STATE-03")
class ForgetsWhatRests(ReferenceExecutor):
    """Only the states of a step's own rows stay on the device."""

    def _result(self, running):
        if self.states is not None:
            parts = [part.rows for part in (running.step.prefill, running.step.decode) if part is not None]
            self.states.hashes[np.setdiff1d(np.arange(len(self.states.hashes)), np.concatenate(parts))] = 0
        return super()._result(running)


@REFERENCE.breaks("ANSWER")
class MixesTheArrivalsUp(ReferenceAdapter):
    """The first tokens of requests that arrive together are those of their neighbours."""

    def draft_input(self, batch, last_tokens):
        answer = super().draft_input(batch, last_tokens)
        return answer and replace(answer, bonus_tokens=answer.bonus_tokens[::-1])


MUTANTS = (*REFERENCE.mutants, *SIMULATED, *REAL)
