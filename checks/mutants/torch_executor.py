"""Planted defects of the real executor, for the executor contract's kill matrix."""

from dataclasses import replace

import numpy as np
import torch

from ...core.contract.step import PARKED_ROUND
from ...gpu.batch.states import BranchStates, ChunkStates, TreeStates
from ...gpu.draft.branches import BranchDraft, _from_sources
from ...gpu.draft.heads import HeadsDraft
from ...gpu.draft.hybrid import HybridDraft
from ...gpu.executor.prompt_runner import PromptRunner
from ...gpu.executor.round import DecodeRound
from ...gpu.executor.rows import Rows
from ...gpu.kernels.constants import numbers
from ...gpu.kernels.layers.delta_rule import advanced
from ...gpu.ops.host_ops import HostOps
from ...gpu.types.attention import PLAIN
from ...gpu.types.recurrence import States
from ..adapters.torch_executor import CheckedExecutor, HybridExecutor
from .planting import Defects

REAL = Defects("executor", CheckedExecutor, prefix="gpu:")
HYBRID = Defects("executor", HybridExecutor, prefix="hybrid:")


def _advanced_without_decay(states, nodes, path, lens, good=advanced):
    entered = good(States(torch.zeros_like(states.matrices), states.inputs), nodes, path, lens)
    return States(states.matrices + entered.matrices, entered.inputs)


def _advanced_with_old_inputs(states, nodes, path, lens, good=advanced):
    return States(good(states, nodes, path, lens).matrices, states.inputs)


@REAL.breaks("ACCEPT-17")
class KeepsTheVerifyPass(CheckedExecutor):
    """The verify pass's hidden states live until the next one: a closure holds them."""

    def __init__(self, config):
        super().__init__(config)
        decode_round = self.executor._rounds.round
        forward = decode_round._verify_forward

        def keeping(*arguments):
            out = forward(*arguments)
            self.executor.last_pass = lambda: out
            return out

        decode_round._verify_forward = keeping


@REAL.breaks("ACCEPT-17")
class CopiesHiddenStatesForAll(CheckedExecutor):
    """Hidden states are computed, compacted and copied to the host even if no request asked for them."""

    def __init__(self, config):
        super().__init__(config)
        rows = self.executor._rows
        wanted = rows.wanted
        rows.wanted = lambda numbers: wanted(numbers) | {"hidden_states"}


@REAL.breaks("ANSWER")
class StopsLate(CheckedExecutor):
    """A stop takes effect one round later than asked."""

    def request_stop(self, last_step_id):
        for running in self.executor._queue:
            running.limit = min(running.limit, running.decoded.rounds + 2)


@REAL.breaks("ANSWER")
class ReusesTheHostBuffer(CheckedExecutor):
    """All results are copied into one buffer on the host, and the next one overwrites the last."""

    def collect(self):
        result = super().collect()
        if result.decode is None:
            return result
        lens = result.decode.accept_lens
        if getattr(self, "buffer", lens[:0]).shape != lens.shape:
            self.buffer = np.empty_like(lens)
        self.buffer[:] = lens
        return replace(result, decode=replace(result.decode, accept_lens=self.buffer))


@REAL.breaks("ANSWER")
class SamplesLikeItsNeighbour(CheckedExecutor):
    """Each row is sampled with the cut-offs of the row before it."""

    def __init__(self, config):
        super().__init__(config)
        rows = self.executor._rows
        sampling = rows.sampling

        def shifted(numbers):
            found = sampling(numbers)
            return found and replace(found, top_k=np.roll(found.top_k, 1), top_p=np.roll(found.top_p, 1))

        rows.sampling = shifted


@REAL.breaks("ANSWER")
class KeepsTheFormerTopK(Rows):
    """A request without top-k samples with that of the request which had its row before."""

    def open(self, join):
        before = self._top_k[join.row]
        super().open(join)
        self._top_k[join.row] = self._top_k[join.row] or before


@REAL.breaks("ANSWER")
class DrawsWithTheAcceptCoin(HostOps):
    """The coin that has rejected the drafts draws the bonus token, too."""

    def verify_sampling(self, tree, probs, accept, bonus):
        return super().verify_sampling(tree, probs, accept, accept)


@REAL.breaks("ANSWER")
class TossesTheSameCoinsAgain(DecodeRound):
    """The positions of a round's coins begin at 0, not at the row's length."""

    def _accept(self, batch, *rest):
        return super()._accept(replace(batch, lengths=torch.zeros_like(batch.lengths)), *rest)


@REAL.breaks("ANSWER")
class LeavesOutWhatReachesTheMass(HostOps):
    """Top-p leaves out the token that reaches the mass, if another is left."""

    def target_probs(self, logits, temperature, top_p, top_k, filtered=True):
        probs = super().target_probs(logits, temperature, top_p, top_k, filtered)
        if not filtered:
            return probs
        rarest = probs.where(probs > 0, torch.inf).argmin(1, keepdim=True)
        has_others = (probs > 0).sum(1, keepdim=True) > 1
        cut = probs.scatter(1, rarest, 0.0)
        return torch.where(has_others & (top_p < 1).unsqueeze(1), cut / cut.sum(1, keepdim=True), probs)


@REAL.breaks("ANSWER")
class PenalisesWhatWasRejected(DecodeRound):
    """Penalties count all nodes of a tree, accepted or not."""

    def finish(self, passed, changes, *rest):
        result = super().finish(passed, changes, *rest)
        if changes is not None:
            lens = torch.full_like(result.accept_lens, passed.tree.num_nodes)
            self._ops.count_tokens_(changes.tables.seen, passed.batch.rows, passed.tree.tokens, lens)
        return result


@REAL.breaks("ANSWER")
class ForgetsTheFirstToken(PromptRunner):
    """The token behind a prompt is not counted among those that penalties are for."""

    def _first_tokens(self, chunks, *rest):
        if self._shaping.changes(chunks.part.rows[chunks.last]) is None:
            return super()._first_tokens(chunks, *rest)
        seen = self._shaping.tables.seen
        before = seen.clone()
        found = super()._first_tokens(chunks, *rest)
        seen.copy_(before)
        return found


@REAL.breaks("ANSWER")
class LeavesExpertsBehind(HostOps):
    """Compaction takes along what is floating point; routed experts stay where their nodes were."""

    def compact(self, values, *where):
        return values if values.dtype == torch.int32 else super().compact(values, *where)


@REAL.breaks("ANSWER")
class LeavesRingsUnmoved(DecodeRound):
    """An accepted path is moved in paged layers alone, and not in the rings of layers with windows."""

    def _compacted(self, passed, verified, wanted):
        rings, self._pool.all_ringed = self._pool.all_ringed, None
        try:
            return super()._compacted(passed, verified, wanted)
        finally:
            self._pool.all_ringed = rings


@REAL.breaks("ANSWER")
class GivesBackTheRootsValue(DecodeRound):
    """A producer goes on from its value at the root of a round, not at the last accepted node."""

    def _keep_produced(self, batch, outputs, verified):
        super()._keep_produced(batch, outputs, replace(verified, accept_lens=torch.ones_like(verified.accept_lens)))


@REAL.breaks("ANSWER")
class RelaysTheRootsState(BranchDraft):
    """The next round drafts from what the head said of the root, not of the last accepted token."""

    @staticmethod
    def _state_at(hidden, last):
        return hidden[:, 0]


@REAL.breaks("ANSWER", functions={_from_sources: lambda hidden, beam: hidden})
class GoesOnFromItsOwnState(CheckedExecutor):
    """A branch that follows another one goes on from the hidden state of its own place."""


@REAL.breaks("ANSWER", "RAISES")
class RestsWithoutBeingParked(DecodeRound):
    """No pass of the draft runs after any round of 0 steps, though a later one drafts from the KV of its tokens."""

    def draft_of(self, shape):
        return super().draft_of(shape if shape.steps else PARKED_ROUND)


@REAL.breaks("ANSWER")
class DraftsFromTheSameSlot(HeadsDraft):
    """Every head of a multi-layer draft says what follows the last accepted token, not the guesses behind it."""

    def _guesses(self, head, logits_hidden, last):
        return super()._guesses(0, logits_hidden, last)


@REAL.breaks("STATE-01", "ANSWER", "RAISES")
class KeepsWhatWasRejected(TreeStates):
    """The state of a recurrent layer takes in all nodes of a tree, not the accepted path alone."""

    def keep_verified(self, verified, num_nodes):
        order = numbers(num_nodes, self._rows.device).expand(len(self._rows), -1)
        self.keep(order, torch.full_like(verified.accept_lens, num_nodes).long())


@REAL.breaks("STATE-01", "ANSWER")
class KeepsTheFirstNodes(TreeStates):
    """A state takes in as many nodes as were accepted, but the first ones of the tree."""

    def keep_verified(self, verified, num_nodes):
        order = numbers(num_nodes, self._rows.device).expand(len(self._rows), -1)
        self.keep(order, verified.accept_lens.long())


@REAL.breaks("STATE-01", "ANSWER", "RAISES")
class KeepsItTwice(TreeStates):
    """The accepted path enters the state in two calls: the round's, and once more."""

    def keep(self, path, lens):
        super().keep(path, lens)
        super().keep(path, lens)


@REAL.breaks("STATE-02", "ANSWER")
class ReadsAFreedSlot(ChunkStates):
    """A row that begins goes on from the state of the request that had its slot before."""

    def __init__(self, pool, rows, prefix_lens, starts, kept, max_len):
        super().__init__(pool, rows, prefix_lens, starts, kept, max_len)
        self._first = torch.zeros_like(self._first)


@REAL.breaks("STATE-01", "ANSWER", "RAISES")
class SharesOneSlot(TreeStates):
    """Two requests have one slot: every row reads and writes the state of the first."""

    def __init__(self, pool, rows, lengths, links):
        super().__init__(pool, rows, lengths, links)
        self._rows = rows[:1].expand(len(rows))


@REAL.breaks("STATE-01", "STATE-02", "ANSWER", functions={advanced: _advanced_without_decay})
class ForgetsToDecay(CheckedExecutor):
    """What enters a state is added to it, and nothing in it fades."""


@REAL.breaks("STATE-01", "STATE-02", "ANSWER", functions={advanced: _advanced_with_old_inputs})
class ConvolvesTheOldInputs(CheckedExecutor):
    """The convolution sees the inputs before the last pass again."""


@REAL.breaks("STATE-03", "STATE-01", "STATE-02", "ANSWER")
class ClearsThePool(ChunkStates):
    """A request that begins clears the slots of all."""

    def __init__(self, pool, rows, prefix_lens, starts, kept, max_len):
        super().__init__(pool, rows, prefix_lens, starts, kept, max_len)
        if self._first.any():
            for layer in pool.layers:
                layer.matrices.zero_()


@REAL.breaks("STATE-01", "ANSWER")
class DraftsInTheRowsSlot(BranchStates):
    """A draft's branches have no copies: the last one writes into the slot of its row."""

    def __init__(self, pool, rows, lengths, branches):
        super().__init__(pool, rows, lengths, branches)
        self.slots = rows.repeat_interleave(branches)

    def run(self, layer, inputs, kernel, shape):
        out = super().run(layer, inputs, kernel, shape)
        self._pool.write(layer, self.slots, self._states[layer])
        return out


@REAL.breaks("STATE-02", "ANSWER", "RAISES")
class LosesTheTailOfAChunk(ChunkStates):
    """The last token of a prompt's chunk never enters the state."""

    def __init__(self, pool, rows, prefix_lens, starts, kept, max_len):
        super().__init__(pool, rows, prefix_lens, starts, kept, max_len)
        self._kept = (kept - 1).clamp(min=0)


@REAL.breaks("ANSWER", "RAISES")
class ForgetsNothing(CheckedExecutor):
    """An executor that begins anew still has the steps in flight, and their rows."""

    def restart(self):
        pass


@REAL.breaks("ANSWER")
class SeesAllInVerify(HostOps):
    """In verify passes a layer with a window sees the whole text."""

    def verify_attention(self, q, k, v, kv, batch, softmax=PLAIN):
        return super().verify_attention(q, k, v, kv, batch, replace(softmax, window=0))


@REAL.breaks("ANSWER")
class VerifiesWithoutTheRoot(CheckedExecutor):
    """Nodes of the second level and below do not see the root of their tree."""

    def __init__(self, config):
        super().__init__(config)
        decode_round = self.executor._rounds.round
        forward = decode_round._verify_forward

        def without_root(batch, tree, *rest):
            bits = torch.where(tree.depths >= 2, tree.ancestor_bits & ~1, tree.ancestor_bits)
            return forward(batch, replace(tree, ancestor_bits=bits), *rest)

        decode_round._verify_forward = without_root


@HYBRID.breaks("DRAFT-01")
class DraftsWithoutWhatWaits(HybridDraft):
    """A row that goes from look-ups to the head drafts at once, and what waited for the head is given up."""

    def _by_the_head(self, batch, relayed, steps):
        for text in map(self._rows.get, batch.row_numbers.tolist()):
            text.caught, text.tail, text.hidden = text.caught + text.num_waiting, text.tail[-1:], []
        return super()._by_the_head(batch, relayed, steps)


@HYBRID.breaks("DRAFT-11")
class LetsAllWait(HybridDraft):
    """As many tokens of a row wait for the head as look-ups go on."""

    def _catch_up_late(self, rows, but=0):
        return {} if but else super()._catch_up_late(rows, but)


@HYBRID.breaks("DRAFT-01")
class TakesTheStatesOfTheRowBefore(HybridDraft):
    """The first states that wait in a row are those that waited there when its last request ended."""

    left = ()

    def close_rows(self, rows):
        self.left = dict(self.left) | {row: self._rows[row].hidden for row in rows or () if row in self._rows}
        super().close_rows(rows)

    def _catch_up_late(self, rows, but=0):
        for row in rows:
            old, text = dict(self.left).get(row), self._rows[row]
            if old and text.hidden:
                states = torch.cat(text.hidden)
                n = min(len(states), sum(map(len, old)))
                text.hidden = [torch.cat((torch.cat(old)[:n], states[n:]))]
        return super()._catch_up_late(rows, but)


@HYBRID.breaks("DRAFT-01")
class RelaysToTheWrongRows(HybridDraft):
    """What the rows relay that the head has caught up with goes to their neighbours."""

    def _catch_up_late(self, rows, but=0):
        return {name: values.flip(0) for name, values in super()._catch_up_late(rows, but).items()}


@HYBRID.breaks("DRAFT-01")
class CatchesUpOneTokenShort(HybridDraft):
    """Where many tokens wait, the one that goes on waiting is taken for the first of the next ones."""

    def _catch_up_late(self, rows, but=0):
        relayed = super()._catch_up_late(rows, but)
        for text in map(self._rows.get, rows if but else ()):
            text.caught, text.tail, text.hidden = text.caught + text.num_waiting, text.tail[-1:], []
        return relayed


MUTANTS = (*REAL.mutants, *HYBRID.mutants)
