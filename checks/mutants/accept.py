"""Planted defects of acceptance and compaction: each is one method of a good component, done wrong as it has been
done wrong before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.kv.moves import KVMovePlan
from ...core.tree import verify
from ...core.tree.outputs import emitted_tokens
from ...core.tree.verify import Verified
from ...properties.accept.plain import PlainAccept
from ..adapters.tree_accept import TreeAccept
from .planting import defects, lookup

OURS = """
GathersTheBonusByTheLiveWidth (ACCEPT-18): The bonus token is gathered with a stride that belongs to the configuration, not to what is
read.
    TreeAccept.verdict:
        index, lens, predict, _ = good(self, round, verified)
        emitted = emitted_tokens(verified.predict, verified.accept_index).ravel()
        last = np.arange(len(lens)) * (self.shape[0] + 1) + lens - 1
        return index, lens, predict, np.maximum(emitted[np.minimum(last, emitted.size - 1)], 0)

SizesAcceptIndexByTheLiveSteps (ACCEPT-18): accept_index is allocated with as many lanes as rounds have now.
    TreeAccept.verdict:
        _, *rest = good(self, round, verified)
        wide = np.pad(verified.accept_index, ((0, 0), (0, self.shape[0] + 1)), constant_values=-1)
        return wide[:, : self.shape[0] + 1].ravel(), *rest

MovesByTheNumberOfNodes (ACCEPT-06, ACCEPT-16): The move takes the lanes of a row nd apart, but accept_index has one
lane per step: from the second row on the move takes lanes of another row.
    TreeAccept.verdict:
        answer = good(self, round, verified)
        lanes = np.resize(verified.accept_index, round.windows.shape)
        taken = np.arange(lanes.shape[1]) < verified.accept_lens[:, None]
        sources = round.windows.ravel()[lanes[taken]]
        round.final = replace(round.final, moves=KVMovePlan(sources, round.windows[taken]))
        return answer

ScattersBeforeItGathers (ACCEPT-16): Lanes are copied one after the other, the last one first, so that a source may have been overwritten.
    TreeAccept.move:
        for source, target in zip(*(slots[::-1] for slots in self.moves(round)), strict=True):
            pools[:, target] = pools[:, source]
        return pools

MovesOneLayer (ACCEPT-06, ACCEPT-16): Keys follow the accepted path, values stay where they are.
    TreeAccept.move = np.concatenate([good(self, round, pools.copy())[:1], pools[1:]])

LooksTheWindowsUpLater (ACCEPT-16): The move uses the slots of the newest launch instead of those of its own round.
    TreeAccept.launch:
        round = good(self, batch)
        self.newest = round.windows
        return round
    TreeAccept.verdict:
        if hasattr(self, "newest") and self.newest.shape == round.windows.shape:
            round.windows = self.newest
        return good(self, round, verified)

LeavesTheLastOutput (ACCEPT-06): One of the captured outputs is not compacted.
    TreeAccept.compact = {**good(self, round, outputs), "routed_experts": outputs["routed_experts"]}

CompactsByTheLiveNodes (ACCEPT-18): Outputs are compacted with as many nodes per row as rounds have now.
    TreeAccept.compact:
        size = round.tree.batch_size * self.shape[2]
        return {name: np.resize(values, (size, *values.shape[1:])) for name, values in good(self, round, outputs).items()}

NumbersPositions (ACCEPT-07): A node's position is the root's plus its number, which is right for chains only.
    TreeAccept.tree:
        tokens, parents, positions = good(self, round)
        nodes = round.tree.num_draft_tokens
        roots = positions.reshape(-1, nodes)[:, :1]
        return tokens, parents, np.where(parents < 0, positions, (roots + np.arange(nodes)).ravel())

RunsPastTheContext (ACCEPT-07): Positions behind the end of the context are not clamped.
    TreeAccept.launch = good(self, batch._replace(max_position=1 << 20))

TrustsTheDraft (ACCEPT-09): Draft ids reach the target as they come.
    TreeAccept.__init__
        - config.vocab_size
        + None

RefusesTheLastId (ACCEPT-09): An off-by-one in the check of draft ids: the last id of the vocabulary counts as garbage.
    TreeAccept.__init__
        - config.vocab_size
        + config.vocab_size - 1

HangsOrphansBelowTheRoot (ACCEPT-09): A proposed node that hangs below nothing becomes a child of the root.
    TreeAccept.propose = good(self, batch._replace(parents=np.maximum(batch.parents, 0)))

MatchesAnyNode (ACCEPT-01): The next node is looked for by its token alone, in the whole tree.
    TreeAccept.verify_greedy:
        wanted, tokens, nodes = argmax_tokens(logits), round.tree.tokens, round.tree.num_draft_tokens
        index = np.full((round.tree.batch_size, round.tree.width), -1, np.int32)
        for row, lanes in enumerate(index):
            node = row * nodes
            for lane in range(len(lanes)):
                lanes[lane] = node
                following = np.flatnonzero(tokens[node + 1 : (row + 1) * nodes] == wanted[node])
                if not len(following) or wanted[node] < 0:
                    break
                node += 1 + int(following[0])
        return self.verdict(round, verified_as(index, wanted))

SkipsTheRoot (ACCEPT-01): accept_index lists the accepted drafts and leaves the root out.
    TreeAccept.verdict:
        _, lens, *rest = good(self, round, verified)
        drafts = np.pad(verified.accept_index[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return np.where(lens[:, None] > 1, drafts, verified.accept_index).ravel(), lens, *rest

CountsDraftsOnly (ACCEPT-02, ACCEPT-01): accept_lens is the number of correct drafts, without the bonus token.
    TreeAccept.verdict
        - verified.accept_lens
        + verified.accept_lens - 1

AcceptsNoDraft (ACCEPT-02): Every draft is rejected: right, and as slow as without them.
    TreeAccept.verify_greedy:
        index = np.full((round.tree.batch_size, round.tree.width), -1, np.int32)
        index[:, 0] = np.arange(round.tree.batch_size) * round.tree.num_draft_tokens
        return self.verdict(round, verified_as(index, argmax_tokens(logits)))

TakesTheLastOfTies (ACCEPT-02): Of equal logits the highest id is taken.
    TreeAccept.verify_greedy:
        last = logits.shape[1] - 1 - argmax_tokens(logits[:, ::-1])
        choices = np.where(argmax_tokens(logits) < 0, -1, last).astype(np.int32)
        return self.verdict(round, verify.verify_greedy(round.tree, choices))

DrawsFromTheWholeTarget (ACCEPT-05, ACCEPT-04): After a rejection the token is drawn from the target's distribution, the rejected drafts
included.
    TreeAccept.verify_sampling:
        good(self, round, probs, accept_coins, bonus_coins)
        verified, rows = round.verified, np.arange(round.tree.batch_size)
        last = verified.accept_index[rows, verified.accept_lens - 1]
        drawn = sample_tokens(probs[last], bonus_coins[rows, verified.accept_lens - 1])
        verified.predict[last] = np.where(verified.predict[last] < 0, -1, drawn)
        return self.verdict(round, verified)

TossesOneCoin (ACCEPT-04): The coin that rejects a draft also draws the token in its place.
    TreeAccept.verify_sampling
        - Coins(accept_coins, bonus_coins)
        + Coins(accept_coins, accept_coins)

FlattensTheTarget (ACCEPT-04): A tiny constant against division by zero gives every token a little mass.
    TreeAccept.verify_sampling
        - round.tree, probs,
        + round.tree, probs + 1e-3,

ShowsAFailedTarget (ACCEPT-04, ACCEPT-02): Where the target gives no numbers, what argmax makes of NaN is emitted.
    TreeAccept.verdict
        - verified.predict,
        + np.maximum(verified.predict, 0),

BreaksTiesByHistory (ACCEPT-13): Equal scores are told apart by how many components the process has made, as an address or a clock would.
    TreeAccept.__init__:
        good(self, config)
        memory["made"] = self.turn = memory.get("made", 0) + 1
    TreeAccept.launch:
        order = np.arange(batch.scores.shape[1])[:: 1 if self.turn % 2 else -1]
        return good(self, batch._replace(scores=batch.scores + 1e-12 * order))

KeepsTheUnlikely (ACCEPT-19): The order of the candidates is turned around: the least likely become nodes.
    TreeAccept.launch = good(self, batch._replace(scores=1 - batch.scores))

HidesTheRoot (ACCEPT-20): The mask climbs one level too few: the deepest nodes do not see the root.
    TreeAccept.links:
        first, sibling, seen, counts = good(self, round)
        nodes = round.tree.num_draft_tokens
        seen = seen.reshape(-1, nodes, nodes).copy()
        seen[:, :, 0] &= seen.sum(axis=2) < round.tree.width
        return first, sibling, seen.ravel(), counts

WalksTheSiblingsInACircle (ACCEPT-20): The last child of a node points at the first again.
    TreeAccept.links:
        first, sibling, *rest = good(self, round)
        parents, numbers = round.tree.parents, np.arange(round.tree.num_draft_tokens)
        eldest = first.reshape(parents.shape)[np.arange(len(parents))[:, None], np.maximum(parents, 0)]
        is_last = (sibling.reshape(parents.shape) < 0) & (parents >= 0) & (eldest < numbers)
        return first, np.where(is_last, eldest, sibling.reshape(parents.shape)).ravel(), *rest

FollowsTheUnlikely (ACCEPT-21): A beam has the least likely candidates of its step.
    TreeAccept.draft:
        def turned(step, tokens, sources):
            ids, shares = model(step, tokens, sources)
            return ids[..., ::-1], 1 - shares[..., ::-1]

        return good(self, batch, turned)

LeavesOutTheTokenThatReachesP (ACCEPT-22): The token with which the mass reaches p is cut off.
    TreeAccept.distribution:
        probs = good(self, logits, temperature, top_k, top_p)
        for row, p in zip(probs, top_p, strict=True):
            kept = np.flatnonzero(row > 0)
            if p < 1 and len(kept) > 1:
                row[kept[row[kept].argmin()]] = 0
                row /= row.sum()
        return probs

TossesTheSameCoinsEveryRound (ACCEPT-23): The position is left out of a coin's key.
    TreeAccept.coins
        - requests, seq_lens,
        + requests, 0 * seq_lens,

SharesACoin (ACCEPT-23): One coin per position decides both about the draft and about the token in its place.
    TreeAccept.coins
        - coins.bonus
        + coins.accept
"""

PLAIN = """
MasksTheRootOnly (ACCEPT-14): The grammar is asked for the root's next token alone.
    PlainAccept.next_state = -1
    PlainAccept.allowed = [True] * self.vocab_size if state < 0 else good(self, round, state)

StaysInTheRootsState (ACCEPT-02, ACCEPT-14): All nodes are masked as the root is: the grammar does not move on along the path.
    PlainAccept.next_state = state

MasksTheBonusOnly (ACCEPT-14): Drafts are matched before the grammar is asked, what is drawn in their place after it.
    PlainAccept.verify_greedy:
        table, round.table = round.table, None
        answer = good(self, round, logits)
        round.table = table
        return answer

ReemitsWithoutADraft (ACCEPT-05): A draft distribution of NaN or zeros rejects the draft, and the token is drawn from the whole target.
    PlainAccept.from_target
        - residual, reached, last = target[:], 0.0, -1
        + if len(children) == 1:
        +     return -1, self.drawn(target, bonus_coin)
        + residual, reached, last = target[:], 0.0, -1

TrustsBrokenDrafts (ACCEPT-05, ACCEPT-04): NaN in a draft's distribution makes the comparison false and the residual empty: the first id
is emitted.
    PlainAccept.is_distribution = True
    PlainAccept.from_draft:
        if all(q == q and 0 <= q < 2 for q in draft) and sum(draft) > 0:
            return good(self, child, token, target, draft, coin, bonus_coin)
        return -1, 0

DrawsFromTheTargetAlone (ACCEPT-04): After a rejected draft the token comes from the target without the draft, not from what the target
has over the draft.
    PlainAccept.beyond = target[:]

ComparesWithoutTheDraft (ACCEPT-04): A draft that was drawn from a distribution is accepted with the target's probability alone.
    PlainAccept.from_draft
        - coin * draft[token]
        + coin

AcceptsAtACoinOfZero (ACCEPT-04): A coin is compared with <= instead of <: a coin of exactly 0 accepts a draft of probability 0.
    PlainAccept.from_target
        - mass > 0 and coin < reached
        + coin < reached or coin == 0

PlansBackwards (ACCEPT-16): Moves are made one after the other, but the list begins at the end of the path.
    PlainAccept.moves
        - for source, _ in pairs
        + for source, _ in pairs[::-1]
        - for _, target in pairs
        + for _, target in pairs[::-1]

MovesDeadLanes (ACCEPT-16): Lanes past the end of the path are moved too: -1 is the last slot of the last row's window.
    PlainAccept.moves:
        flat = [slot for window in round.windows for slot in window]
        return [flat[node] for node in self.index(round)], flat

MovesWholePages (ACCEPT-16): KV is moved by pages of four slots, though paths branch inside them.
    PlainAccept.move:
        for source, target in zip(*self.moves(round), strict=True):
            begin, end = (slot // 4 * 4 for slot in (source, target))
            width = min(4, pools.shape[1] - max(begin, end))
            pools[:, end : end + width] = pools[:, begin : begin + width]
        return pools

MovesOneSlotTooMany (ACCEPT-16): A row's move ends one lane late, behind its window.
    PlainAccept.moves:
        sources, targets = good(self, round)
        return [*sources, *sources[-1:]], [*targets, *(target + 1 for target in targets[-1:])]
"""
"""Of grammars, known draft distributions and ordered moves."""


def verified_as(accept_index: np.ndarray, predict: np.ndarray) -> Verified:
    """Return a verdict with this path and these predictions, the rest as it follows from them."""
    lens = (accept_index >= 0).sum(axis=1, dtype=np.int32)
    last = accept_index[np.arange(len(lens)), lens - 1]
    bonus = predict[last]
    return Verified(accept_index, lens, lens - 1, predict, np.maximum(bonus, 0), bonus < 0)


_FUNCTIONS = [replace, KVMovePlan, emitted_tokens, verify.sample_tokens, verified_as]
MUTANTS = (
    *defects("accept", TreeAccept, [TreeAccept, *_FUNCTIONS], OURS, verify=verify),
    *defects("accept", PlainAccept, [PlainAccept], PLAIN),
)
__getattr__ = lookup(MUTANTS)
