"""Planted defects of the real executor, for the executor contract's kill matrix."""

from dataclasses import replace

import numpy as np

from ...gpu.batch import states
from ...gpu.batch.states import BranchStates, ChunkStates, TreeStates
from ...gpu.draft.branches import BranchDraft
from ...gpu.draft.heads import HeadsDraft
from ...gpu.executor import shaping
from ...gpu.executor.prompt_runner import PromptRunner
from ...gpu.executor.round import DecodeRound
from ...gpu.ops.torch_ops import TorchOps
from ..adapters.torch_executor import CheckedExecutor
from .planting import defects, lookup

REAL = """
KeepsTheVerifyPass (ACCEPT-17): The verify pass's hidden states live until the next one: a closure holds them.
    CheckedExecutor.__init__:
        good(self, config)
        decode_round = self.executor._rounds.round
        forward = decode_round._verify_forward

        def keeping(*arguments):
            out = forward(*arguments)
            self.executor.last_pass = lambda: out
            return out

        decode_round._verify_forward = keeping

ShowsHiddenStatesToAll (ACCEPT-17): Hidden states are computed, compacted and copied to the host even if no request asked for them.
    CheckedExecutor.__init__:
        good(self, config)
        rows = self.executor._rows
        wanted = rows.wanted
        rows.wanted = lambda numbers: wanted(numbers) | {"hidden_states"}

StopsLate (ANSWER): A stop takes effect one round later than asked.
    CheckedExecutor.request_stop:
        for running in self.executor._queue:
            running.limit = min(running.limit, running.decoded.rounds + 2)

ReusesTheHostBuffer (ANSWER): All results are copied into one buffer on the host, and the next one overwrites the last.
    CheckedExecutor.collect:
        result = good(self)
        if result.decode is None:
            return result
        lens = result.decode.accept_lens
        if getattr(self, "buffer", lens[:0]).shape != lens.shape:
            self.buffer = np.empty_like(lens)
        self.buffer[:] = lens
        return replace(result, decode=replace(result.decode, accept_lens=self.buffer))

SamplesLikeItsNeighbour (ANSWER): Each row is sampled with the cut-offs of the row before it.
    CheckedExecutor.__init__:
        good(self, config)
        rows = self.executor._rows
        sampling = rows.sampling

        def shifted(numbers):
            found = sampling(numbers)
            return found and replace(found, top_k=np.roll(found.top_k, 1), top_p=np.roll(found.top_p, 1))

        rows.sampling = shifted

DrawsWithTheAcceptCoin (ANSWER): The coin that has rejected the drafts draws the bonus token, too.
    DecodeRound._accept
        - return self._ops.verify_sampling(tree, probs, accept, bonus)
        + return self._ops.verify_sampling(tree, probs, accept, accept)

TossesTheSameCoinsEveryRound (ANSWER): The positions of a round's coins begin at 0, not at the row's length.
    DecodeRound._accept
        - positions = batch.lengths[:, None] + numbers(tree.width, logits.device)
        + positions = numbers(tree.width, logits.device)[None, :].expand(len(batch.lengths), -1)

LeavesOutWhatReachesTheMass (ANSWER): Top-p leaves out the token that reaches the mass, if another is left.
    shaping._filter
        - mass_before = ranked.cumsum(1) - ranked
        + mass_before = ranked.cumsum(1)

PenalisesWhatWasRejected (ANSWER): Penalties count all nodes of a tree, accepted or not.
    DecodeRound.finish
        - self._ops.count_tokens_(changes.tables.seen, batch.rows, emitted, verified.accept_lens)
        + lens = torch.full_like(verified.accept_lens, tree.num_nodes)
        + self._ops.count_tokens_(changes.tables.seen, batch.rows, tree.tokens, lens)

ForgetsTheFirstToken (ANSWER): The token behind a prompt is not counted among those that penalties are for.
    PromptRunner._first_tokens
        - self._ops.count_tokens_(changes.tables.seen, numbers, sampled.unsqueeze(1), ones)
        + self._ops.count_tokens_(changes.tables.seen, numbers, sampled.unsqueeze(1), ones * 0)

LeavesExpertsBehind (ANSWER): Compaction takes along what is floating point; routed experts stay where their nodes were.
    CheckedExecutor.__init__:
        good(self, config)
        ops = self.executor._ops
        compact = ops.compact
        ops.compact = lambda values, *where: values if values.dtype == torch.int32 else compact(values, *where)

RelaysTheRootsState (ANSWER): The next round drafts from what the head said of the root, not of the last accepted token.
    BranchDraft.catch_up
        - hidden = at_column(hidden.view(bs, columns, -1), last)
        + hidden = at_column(hidden.view(bs, columns, -1), last * 0)

GoesOnFromItsOwnState (ANSWER): A branch that follows another one goes on from the hidden state of its own place.
    BranchDraft._tree
        - hidden = None if hidden is None else _from_sources(hidden, beam)

DraftsFromTheSameSlot (ANSWER): Every head of a multi-layer draft says what follows the last accepted token, not the guesses behind it.
    HeadsDraft.catch_up
        - accept_lens - 1 + head)
        + accept_lens - 1)

KeepsWhatWasRejected (STATE-01, ANSWER, RAISES): The state of a recurrent layer takes in all nodes of a tree, not the accepted path alone.
    TreeStates.keep_verified
        - self.keep(verified.accept_index.long() - firsts, verified.accept_lens.long())
        + order = numbers(num_nodes, firsts.device).expand(len(firsts), -1)
        + self.keep(order, torch.full_like(verified.accept_lens, num_nodes).long())

KeepsTheFirstNodes (STATE-01, ANSWER): A state takes in as many nodes as were accepted, but the first ones of the tree.
    TreeStates.keep_verified
        - self.keep(verified.accept_index.long() - firsts, verified.accept_lens.long())
        + self.keep(numbers(num_nodes, firsts.device).expand(len(firsts), -1), verified.accept_lens.long())

KeepsItTwice (STATE-01, ANSWER, RAISES): The accepted path enters the state in two calls: the round's, and once more.
    TreeStates.keep:
        good(self, path, lens)
        good(self, path, lens)

ReadsAFreedSlot (STATE-02, ANSWER): A row that begins goes on from the state of the request that had its slot before.
    ChunkStates.__init__:
        good(self, pool, rows, prefix_lens, starts, kept, max_len)
        self._first = torch.zeros_like(self._first)

SharesOneSlot (STATE-01, ANSWER, RAISES): Two requests have one slot: every row reads and writes the state of the first.
    TreeStates.__init__:
        good(self, pool, rows, lengths, links)
        self._rows = rows[:1].expand(len(rows))

ForgetsToDecay (STATE-01, STATE-02, ANSWER): What enters a state is added to it, and nothing in it fades.
    states.advanced
        - matrices = states.matrices * total.exp().transpose(1, 2).unsqueeze(-1) + changes
        + matrices = states.matrices + changes

ConvolvesTheOldInputs (STATE-01, STATE-02, ANSWER): The convolution sees the inputs before the last pass again.
    states.advanced
        - return States(matrices, seen.gather(1, last.unsqueeze(-1).expand(-1, -1, seen.shape[2])))
        + return States(matrices, states.inputs)

ClearsThePool (STATE-03, STATE-01, STATE-02, ANSWER): A request that begins clears the slots of all.
    ChunkStates.__init__:
        good(self, pool, rows, prefix_lens, starts, kept, max_len)
        if self._first.any():
            for layer in pool.layers:
                layer.matrices.zero_()

DraftsInTheRowsSlot (STATE-01, ANSWER): A draft's branches have no copies: the last one writes into the slot of its row.
    BranchStates.__init__:
        good(self, pool, rows, lengths, branches)
        self.slots = rows.repeat_interleave(branches)
    BranchStates.run:
        out = good(self, layer, inputs, kernel, shape)
        self._pool.write(layer, self.slots, self._states[layer])
        return out

LosesTheTailOfAChunk (STATE-02, ANSWER, RAISES): The last token of a prompt's chunk never enters the state.
    ChunkStates.__init__:
        good(self, pool, rows, prefix_lens, starts, kept, max_len)
        self._kept = (kept - 1).clamp(min=0)

ForgetsNothing (ANSWER, RAISES): An executor that begins anew still has the steps in flight, and their rows.
    CheckedExecutor.restart(self) = None

SeesAllInVerify (ANSWER): In verify passes a layer with a window sees the whole text.
    TorchOps.verify_attention
        - window = softmax.window_within(batch.max_prefix_len + batch.ancestor_bits.shape[1])
        + window = 0

HidesTheRoot (ANSWER): Nodes of the second level and below do not see the root of their tree.
    CheckedExecutor.__init__:
        good(self, config)
        decode_round = self.executor._rounds.round
        forward = decode_round._verify_forward

        def without_root(batch, tree, *rest):
            bits = torch.where(tree.depths >= 2, tree.ancestor_bits & ~1, tree.ancestor_bits)
            return forward(batch, replace(tree, ancestor_bits=bits), *rest)

        decode_round._verify_forward = without_root
"""

_PLACES = [
    *(BranchDraft, BranchStates, CheckedExecutor, ChunkStates, DecodeRound, HeadsDraft, PromptRunner, TreeStates),
    *(TorchOps, replace, shaping, states),
]
MUTANTS = defects("executor", CheckedExecutor, _PLACES, REAL, prefix="gpu:", np=np)
__getattr__ = lookup(MUTANTS)
