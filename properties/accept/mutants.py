"""Planted defects of acceptance and compaction: each is one method of a good one, done wrong in a way that has been done wrong before."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np

from ...core.kv.moves import KVMovePlan
from ...core.tree import verify
from ...core.tree.finalize import emitted_tokens
from ...core.tree.verify import Verified, argmax_tokens, sample_tokens
from ..adapters.tree_accept import TreeAccept
from ..adapters.tree_accept import make as make_tree_accept
from ..mutants import Mutant
from .contract import AcceptCapabilities, AcceptConfig
from .plain import EVERYTHING, PlainAccept

# -- of core.tree and core.kv.moves -----------------------------------------------------------------------------------


class GathersTheBonusByTheLiveWidth(TreeAccept):
    """The bonus token is gathered with a stride that belongs to the configuration, not to what is read."""

    def verdict(self, round, verified):
        index, lens, predict, _ = super().verdict(round, verified)
        emitted = emitted_tokens(verified.predict, verified.accept_index).reshape(-1)
        last = np.arange(len(lens)) * (self.shape[0] + 1) + lens - 1
        return index, lens, predict, np.maximum(emitted[np.minimum(last, max(emitted.size - 1, 0))], 0)


class SizesAcceptIndexByTheLiveSteps(TreeAccept):
    """accept_index is allocated with as many lanes as rounds have now."""

    def verdict(self, round, verified):
        _, lens, predict, bonus = super().verdict(round, verified)
        lanes = np.full((len(lens), self.shape[0] + 1), -1, np.int32)
        columns = min(lanes.shape[1], verified.accept_index.shape[1])
        lanes[:, :columns] = verified.accept_index[:, :columns]
        return lanes.ravel(), lens, predict, bonus


class MovesByTheNumberOfNodes(TreeAccept):
    """The move takes a row's lanes nd apart, where accept_index has them one per step apart: from the second row on they are another's."""

    def verdict(self, round, verified):
        answer = super().verdict(round, verified)
        rows, nodes = round.windows.shape
        lanes = np.zeros(rows * nodes, np.int64)
        given = verified.accept_index.ravel()[: rows * nodes]
        lanes[: len(given)] = given
        taken = np.arange(nodes) < verified.accept_lens[:, None]
        sources = round.windows.ravel()[lanes].reshape(rows, nodes)
        round.final = replace(round.final, moves=KVMovePlan(sources[taken], round.windows[taken]))
        return answer


class ScattersBeforeItGathers(TreeAccept):
    """Lanes are copied one after the other, the last one first, so that a source may have been overwritten."""

    def move(self, round, pools):
        for source, target in zip(*(slots[::-1] for slots in self.moves(round)), strict=True):
            pools[:, target] = pools[:, source]
        return pools


class MovesOneLayer(TreeAccept):
    """Keys follow the accepted path, values stay where they are."""

    def move(self, round, pools):
        return np.concatenate([super().move(round, pools.copy())[:1], pools[1:]])


class MovesNothing(TreeAccept):
    """The accepted path of a tree is taken for contiguous, as that of a chain is."""

    def moves(self, round):
        return [], []

    def move(self, round, pools):
        return pools


class LooksTheWindowsUpLater(TreeAccept):
    """The slots to move are those of the newest launch, not of the round's own."""

    newest = None

    def launch(self, batch):
        round = super().launch(batch)
        self.newest = round.windows
        return round

    def verdict(self, round, verified):
        if self.newest is not None and self.newest.shape == round.windows.shape:
            round.windows = self.newest
        return super().verdict(round, verified)


class LeavesTheLastOutput(TreeAccept):
    """One of the captured outputs is not compacted."""

    def compact(self, round, outputs):
        return {**super().compact(round, outputs), "routed_experts": outputs["routed_experts"]}


class CompactsByTheLiveNodes(TreeAccept):
    """Outputs are compacted with as many nodes per row as rounds have now."""

    def compact(self, round, outputs):
        rows, nodes = round.tree.parents.shape
        live = self.shape[2]
        index = {name: values[: rows * live].copy() for name, values in outputs.items()}
        return index if live != nodes else super().compact(round, outputs)


class CompactsInPlace(TreeAccept):
    """An output's lanes are written from the last to the first, in place."""

    def compact(self, round, outputs):
        found = {name: values.copy() for name, values in outputs.items()}
        index, nodes = round.verified.accept_index, round.tree.num_draft_tokens
        for row, lanes in enumerate(index):
            for lane in range(round.verified.accept_lens[row] - 1, -1, -1):
                for values in found.values():
                    values[row * nodes + lane] = values[lanes[lane]]
        return found


class NumbersPositions(TreeAccept):
    """A node's position is the root's plus its number, which is right for chains only."""

    def tree(self, round):
        tokens, parents, positions = super().tree(round)
        nodes = round.tree.num_draft_tokens
        roots = positions.reshape(-1, nodes)[:, :1]
        return tokens, parents, np.where(parents < 0, positions, (roots + np.arange(nodes)).ravel())


class CountsPositionsFromTheBonus(TreeAccept):
    """The root is taken for a token that has KV already: all positions are one too far."""

    def launch(self, batch):
        return super().launch(batch._replace(seq_lens=batch.seq_lens + 1))


class RunsPastTheContext(TreeAccept):
    """Positions behind the end of the context are not clamped."""

    def launch(self, batch):
        return super().launch(batch._replace(max_position=1 << 20))


class TrustsTheDraft(TreeAccept):
    """Draft ids reach the target as they come."""

    def __init__(self, config):
        super().__init__(config)
        self.vocab_size = None


class RefusesTheLastId(TreeAccept):
    """An off-by-one in the check of draft ids: the last id of the vocabulary counts as garbage."""

    def __init__(self, config):
        super().__init__(config)
        self.vocab_size = config.vocab_size - 1


class HangsOrphansBelowTheRoot(TreeAccept):
    """A proposed node that hangs below nothing becomes a child of the root."""

    def propose(self, batch):
        return super().propose(batch._replace(parents=np.maximum(batch.parents, 0)))


class MatchesAnyNode(TreeAccept):
    """The next node is looked for by its token alone, in the whole tree."""

    def verify_greedy(self, round, logits):
        rows, nodes = round.tree.parents.shape
        wanted = argmax_tokens(logits).reshape(rows, nodes)
        tokens = round.tree.tokens.reshape(rows, nodes)
        index = np.full((rows, round.tree.width), -1, np.int32)
        for row in range(rows):
            node, lane = 0, 0
            while lane < round.tree.width:
                index[row, lane] = row * nodes + node
                following = np.flatnonzero(tokens[row, node + 1 :] == wanted[row, node])
                if not len(following) or wanted[row, node] < 0:
                    break
                node, lane = node + 1 + int(following[0]), lane + 1
        return self.verdict(round, verified_as(index, wanted.ravel()))


class SkipsTheRoot(TreeAccept):
    """accept_index lists the accepted drafts and leaves the root out."""

    def verdict(self, round, verified):
        _, lens, predict, bonus = super().verdict(round, verified)
        lanes = verified.accept_index.copy()
        long = lens > 1
        lanes[long, :-1] = lanes[long, 1:]
        lanes[long, -1] = -1
        return lanes.ravel(), lens, predict, bonus


class CountsDraftsOnly(TreeAccept):
    """accept_lens is the number of correct drafts, without the bonus token."""

    def verdict(self, round, verified):
        index, lens, predict, bonus = super().verdict(round, verified)
        return index, lens - 1, predict, bonus


class AcceptsNoDraft(TreeAccept):
    """Every draft is rejected: right, and as slow as without them."""

    def verify_greedy(self, round, logits):
        index = np.full((round.tree.batch_size, round.tree.width), -1, np.int32)
        index[:, 0] = np.arange(round.tree.batch_size) * round.tree.num_draft_tokens
        return self.verdict(round, verified_as(index, argmax_tokens(logits)))


class TakesTheLastOfTies(TreeAccept):
    """Of equal logits the highest id is taken."""

    def verify_greedy(self, round, logits):
        last = logits.shape[1] - 1 - argmax_tokens(logits[:, ::-1])
        choices = np.where(argmax_tokens(logits) < 0, -1, last).astype(np.int32)
        return self.verdict(round, verify.verify_greedy(round.tree, choices))


class DrawsFromTheWholeTarget(TreeAccept):
    """After a rejection the token is drawn from the target's distribution, the rejected drafts included."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        answer = super().verify_sampling(round, probs, accept_coins, bonus_coins)
        for row, lane in enumerate(round.verified.accept_lens - 1):
            node = round.verified.accept_index[row, lane]
            if round.verified.predict[node] >= 0:
                token = sample_tokens(probs[node : node + 1], bonus_coins[row : row + 1, lane])
                round.verified.predict[node] = token[0]
        return self.verdict(round, round.verified) if len(answer) else answer


class TossesOneCoin(TreeAccept):
    """The coin that rejects a draft also draws the token in its place."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        return super().verify_sampling(round, probs, accept_coins, accept_coins)


class AcceptsTheLikely(TreeAccept):
    """Drafts are accepted if the target's probability passes a threshold, whatever the coin."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        return super().verify_sampling(round, probs, np.full_like(accept_coins, 0.3), bonus_coins)


class FlattensTheTarget(TreeAccept):
    """A tiny constant against division by zero gives every token a little mass."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        return super().verify_sampling(round, probs + 1e-3, accept_coins, bonus_coins)


class ShowsAFailedTarget(TreeAccept):
    """Where the target gives no numbers, what argmax makes of NaN is emitted."""

    def verdict(self, round, verified):
        index, lens, predict, bonus = super().verdict(round, verified)
        return index, lens, np.maximum(predict, 0), bonus


class TossesItsOwnCoins(TreeAccept):
    """Every rank has a generator of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.rank = config.rank

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        shifted = (accept_coins + 0.37 * self.rank) % 1.0
        return super().verify_sampling(round, probs, shifted, bonus_coins)


class BreaksTiesByHistory(TreeAccept):
    """Equal scores are told apart by how many components the process has made, as an address or a clock would."""

    made = count()

    def __init__(self, config):
        super().__init__(config)
        self.turn = next(BreaksTiesByHistory.made) % 2

    def launch(self, batch):
        order = np.arange(batch.scores.shape[1])[:: -1 if self.turn else 1]
        return super().launch(batch._replace(scores=batch.scores * np.float32(1) + np.float32(1e-6) * order))


# -- of the plain one: constraints, known draft distributions, moves in order -----------------------------------------


class MasksTheRootOnly(PlainAccept):
    """The grammar is asked for the root's next token alone."""

    def next_state(self, round, state, token):
        return -1

    def allowed(self, round, state):
        return [True] * self.vocab_size if state < 0 else super().allowed(round, state)


class StaysInTheRootsState(PlainAccept):
    """All nodes are masked as the root is: the grammar does not move on along the path."""

    def next_state(self, round, state, token):
        return state


class MasksTheBonusOnly(PlainAccept):
    """Drafts are matched before the grammar is asked, what is drawn in their place after it."""

    def verify_greedy(self, round, logits):
        table, round.table = round.table, None
        answer = super().verify_greedy(round, logits)
        round.table = table
        return answer


class ReemitsWithoutADraft(PlainAccept):
    """A draft distribution of NaN or zeros rejects the draft, and the token is drawn from the whole target."""

    def from_target(self, tokens, children, target, coin, bonus_coin):
        if len(children) == 1:
            return -1, self.drawn(target, bonus_coin)
        return super().from_target(tokens, children, target, coin, bonus_coin)


class TrustsBrokenDrafts(PlainAccept):
    """NaN in a draft's distribution makes the comparison false and the residual nothing: the first id is emitted."""

    def is_distribution(self, probs):
        return True

    def from_draft(self, child, token, target, draft, coin, bonus_coin):
        if all(q == q and 0 <= q < 2 for q in draft) and sum(draft) > 0:
            return super().from_draft(child, token, target, draft, coin, bonus_coin)
        return -1, 0


class DrawsFromTheTargetAlone(PlainAccept):
    """After a rejected draft the token comes from the target without the draft, not from what the target has over the draft."""

    def beyond(self, target, draft):
        return target[:]


class ComparesWithoutTheDraft(PlainAccept):
    """A draft that was drawn from a distribution is accepted with the target's probability alone."""

    def from_draft(self, child, token, target, draft, coin, bonus_coin):
        even = [1.0 if at == token else q for at, q in enumerate(draft)]
        return super().from_draft(child, token, target, even, coin, bonus_coin)


class PlansBackwards(PlainAccept):
    """Moves that are made one after the other are listed from the end of the path."""

    def moves(self, round):
        sources, targets = super().moves(round)
        return sources[::-1], targets[::-1]


class MovesDeadLanes(PlainAccept):
    """Lanes past the end of the path are moved too: -1 is the last slot of the last row's window."""

    def moves(self, round):
        flat = [slot for window in round.windows for slot in window]
        index = self.index(round)
        pairs = [(flat[node], slot) for node, slot in zip(index, flat, strict=True) if flat[node] != slot]
        return [source for source, _ in pairs], [target for _, target in pairs]


class ForgetsTheRowsOffset(PlainAccept):
    """A node's number inside its row is used as its number in the batch."""

    def moves(self, round):
        flat = [slot for window in round.windows for slot in window]
        pairs = [
            (flat[node], window[lane])
            for window, path in zip(round.windows, round.paths, strict=True)
            for lane, node in enumerate(path)
            if lane != node
        ]
        return [source for source, _ in pairs], [target for _, target in pairs]


class MovesWholePages(PlainAccept):
    """KV is moved by pages of four slots, though paths branch inside them."""

    def move(self, round, pools):
        for source, target in zip(*self.moves(round), strict=True):
            begin, end = (slot // 4 * 4 for slot in (source, target))
            width = min(4, pools.shape[1] - max(begin, end))
            pools[:, end : end + width] = pools[:, begin : begin + width]
        return pools


class MovesOneSlotTooMany(PlainAccept):
    """A row's move ends one lane late, behind its window."""

    def moves(self, round):
        sources, targets = super().moves(round)
        return [*sources, *sources[-1:]], [*targets, *(target + 1 for target in targets[-1:])]


# -- how they are made ------------------------------------------------------------------------------------------------


def verified_as(accept_index: np.ndarray, predict: np.ndarray) -> Verified:
    """A verdict with this path and these predictions, the rest as it follows from them."""
    lens = (accept_index >= 0).sum(axis=1, dtype=np.int32)
    last = accept_index[np.arange(len(lens)), lens - 1]
    bonus = predict[last]
    return Verified(accept_index, lens, lens - 1, predict, np.maximum(bonus, 0), bonus < 0)


def of_trees(kind: type[TreeAccept]):
    def make(config: AcceptConfig) -> TreeAccept:
        return kind(config)

    make.capabilities = make_tree_accept.capabilities
    return make


def of_plain(kind: type[PlainAccept], capabilities: AcceptCapabilities = EVERYTHING):
    def make(config: AcceptConfig) -> PlainAccept:
        return kind(config)

    make.capabilities = capabilities
    return make


_DEFECTS = (
    (GathersTheBonusByTheLiveWidth, of_trees, ("ACCEPT-18",)),
    (SizesAcceptIndexByTheLiveSteps, of_trees, ("ACCEPT-18",)),
    (MovesByTheNumberOfNodes, of_trees, ("ACCEPT-16",)),
    (ScattersBeforeItGathers, of_trees, ("ACCEPT-16",)),
    (MovesOneLayer, of_trees, ("ACCEPT-06",)),
    (MovesNothing, of_trees, ("ACCEPT-06",)),
    (LooksTheWindowsUpLater, of_trees, ("ACCEPT-16",)),
    (LeavesTheLastOutput, of_trees, ("ACCEPT-06",)),
    (CompactsByTheLiveNodes, of_trees, ("ACCEPT-18",)),
    (CompactsInPlace, of_trees, ("ACCEPT-06",)),
    (NumbersPositions, of_trees, ("ACCEPT-07",)),
    (CountsPositionsFromTheBonus, of_trees, ("ACCEPT-07",)),
    (RunsPastTheContext, of_trees, ("ACCEPT-07",)),
    (TrustsTheDraft, of_trees, ("ACCEPT-09",)),
    (RefusesTheLastId, of_trees, ("ACCEPT-09",)),
    (HangsOrphansBelowTheRoot, of_trees, ("ACCEPT-09",)),
    (MatchesAnyNode, of_trees, ("ACCEPT-01",)),
    (SkipsTheRoot, of_trees, ("ACCEPT-01",)),
    (CountsDraftsOnly, of_trees, ("ACCEPT-02",)),
    (AcceptsNoDraft, of_trees, ("ACCEPT-02",)),
    (TakesTheLastOfTies, of_trees, ("ACCEPT-02",)),
    (DrawsFromTheWholeTarget, of_trees, ("ACCEPT-05", "ACCEPT-04")),
    (TossesOneCoin, of_trees, ("ACCEPT-04",)),
    (AcceptsTheLikely, of_trees, ("ACCEPT-04",)),
    (FlattensTheTarget, of_trees, ("ACCEPT-04",)),
    (ShowsAFailedTarget, of_trees, ("ACCEPT-04", "ACCEPT-02")),
    (TossesItsOwnCoins, of_trees, ("ACCEPT-13",)),
    (BreaksTiesByHistory, of_trees, ("ACCEPT-13",)),
    (MasksTheRootOnly, of_plain, ("ACCEPT-14",)),
    (StaysInTheRootsState, of_plain, ("ACCEPT-14",)),
    (MasksTheBonusOnly, of_plain, ("ACCEPT-14",)),
    (ReemitsWithoutADraft, of_plain, ("ACCEPT-05",)),
    (TrustsBrokenDrafts, of_plain, ("ACCEPT-05", "ACCEPT-04")),
    (DrawsFromTheTargetAlone, of_plain, ("ACCEPT-04",)),
    (ComparesWithoutTheDraft, of_plain, ("ACCEPT-04",)),
    (PlansBackwards, of_plain, ("ACCEPT-16",)),
    (MovesDeadLanes, of_plain, ("ACCEPT-16",)),
    (ForgetsTheRowsOffset, of_plain, ("ACCEPT-16",)),
    (MovesWholePages, of_plain, ("ACCEPT-16",)),
    (MovesOneSlotTooMany, of_plain, ("ACCEPT-16",)),
)
"""(class, how it is made, the invariants of which one must catch it)."""

MUTANTS = tuple(
    Mutant(kind.__name__, kind.__doc__, "accept", how(kind), caught_by) for kind, how, caught_by in _DEFECTS
)
