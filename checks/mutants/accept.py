"""Planted defects of acceptance and compaction: each is a subclass of a good component, done wrong as it has been
done wrong before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.kv.moves import KVMovePlan
from ...core.tree import verify
from ...core.tree.outputs import emitted_tokens
from ...core.tree.verify import Verified, argmax_tokens, sample_tokens
from ..adapters.tree_accept import TreeAccept
from .accept_plain import MUTANTS as PLAIN
from .planting import Defects


def verified_as(accept_index: np.ndarray, predict: np.ndarray) -> Verified:
    """Return a verdict with this path and these predictions, the rest as it follows from them."""
    lens = (accept_index >= 0).sum(axis=1, dtype=np.int32)
    last = accept_index[np.arange(len(lens)), lens - 1]
    bonus = predict[last]
    return Verified(accept_index, lens, lens - 1, predict, np.maximum(bonus, 0), bonus < 0)


OURS = Defects("accept", TreeAccept)


@OURS.breaks("ACCEPT-18")
class GathersTheBonusByTheLiveWidth(TreeAccept):
    """The bonus token is gathered with a stride that belongs to the configuration, not to what is read."""

    def verdict(self, round, verified):
        index, lens, predict, _ = super().verdict(round, verified)
        emitted = emitted_tokens(verified.predict, verified.accept_index).ravel()
        last = np.arange(len(lens)) * (self.shape[0] + 1) + lens - 1
        return index, lens, predict, np.maximum(emitted[np.minimum(last, emitted.size - 1)], 0)


@OURS.breaks("ACCEPT-18")
class SizesAcceptIndexByTheLiveSteps(TreeAccept):
    """accept_index is allocated with as many lanes as rounds have now."""

    def verdict(self, round, verified):
        _, *rest = super().verdict(round, verified)
        wide = np.pad(verified.accept_index, ((0, 0), (0, self.shape[0] + 1)), constant_values=-1)
        return wide[:, : self.shape[0] + 1].ravel(), *rest


@OURS.breaks("ACCEPT-06", "ACCEPT-16")
class MovesByTheNumberOfNodes(TreeAccept):
    """The move takes the lanes of a row nd apart, but accept_index has one lane per step: from the second row on the
    move takes lanes of another row."""

    def verdict(self, round, verified):
        answer = super().verdict(round, verified)
        lanes = np.resize(verified.accept_index, round.windows.shape)
        taken = np.arange(lanes.shape[1]) < verified.accept_lens[:, None]
        sources = round.windows.ravel()[lanes[taken]]
        round.final = replace(round.final, moves=KVMovePlan(sources, round.windows[taken]))
        return answer


@OURS.breaks("ACCEPT-16")
class ScattersBeforeItGathers(TreeAccept):
    """Lanes are copied one after the other, the last one first, so that a source may have been overwritten."""

    def move(self, round, pools):
        for source, target in zip(*(slots[::-1] for slots in self.moves(round)), strict=True):
            pools[:, target] = pools[:, source]
        return pools


@OURS.breaks("ACCEPT-06", "ACCEPT-16")
class MovesOneLayer(TreeAccept):
    """Keys follow the accepted path, values stay where they are."""

    def move(self, round, pools):
        return np.concatenate([super().move(round, pools.copy())[:1], pools[1:]])


@OURS.breaks("ACCEPT-16")
class LooksTheWindowsUpLater(TreeAccept):
    """The move uses the slots of the newest launch instead of those of its own round."""

    def launch(self, batch):
        round = super().launch(batch)
        self.newest = round.windows
        return round

    def verdict(self, round, verified):
        if hasattr(self, "newest") and self.newest.shape == round.windows.shape:
            round.windows = self.newest
        return super().verdict(round, verified)


@OURS.breaks("ACCEPT-06")
class LeavesTheLastOutput(TreeAccept):
    """One of the captured outputs is not compacted."""

    def compact(self, round, outputs):
        return {**super().compact(round, outputs), "routed_experts": outputs["routed_experts"]}


@OURS.breaks("ACCEPT-18")
class CompactsByTheLiveNodes(TreeAccept):
    """Outputs are compacted with as many nodes per row as rounds have now."""

    def compact(self, round, outputs):
        size = round.tree.batch_size * self.shape[2]
        kept = super().compact(round, outputs)
        return {name: np.resize(values, (size, *values.shape[1:])) for name, values in kept.items()}


@OURS.breaks("ACCEPT-07")
class NumbersPositions(TreeAccept):
    """A node's position is the root's plus its number, which is right for chains only."""

    def tree(self, round):
        tokens, parents, positions = super().tree(round)
        nodes = round.tree.num_draft_tokens
        roots = positions.reshape(-1, nodes)[:, :1]
        return tokens, parents, np.where(parents < 0, positions, (roots + np.arange(nodes)).ravel())


@OURS.breaks("ACCEPT-07")
class RunsPastTheContext(TreeAccept):
    """Positions behind the end of the context are not clamped."""

    def launch(self, batch):
        return super().launch(batch._replace(max_position=1 << 20))


@OURS.breaks("ACCEPT-09")
class TrustsTheDraft(TreeAccept):
    """Draft ids reach the target as they come."""

    def __init__(self, config):
        super().__init__(config)
        self.vocab_size = None


@OURS.breaks("ACCEPT-09")
class RefusesTheLastId(TreeAccept):
    """An off-by-one in the check of draft ids: the last id of the vocabulary counts as garbage."""

    def __init__(self, config):
        super().__init__(config)
        self.vocab_size -= 1


@OURS.breaks("ACCEPT-09")
class HangsOrphansBelowTheRoot(TreeAccept):
    """A proposed node that hangs below nothing becomes a child of the root."""

    def propose(self, batch):
        return super().propose(batch._replace(parents=np.maximum(batch.parents, 0)))


@OURS.breaks("ACCEPT-01")
class MatchesAnyNode(TreeAccept):
    """The next node is looked for by its token alone, in the whole tree."""

    def verify_greedy(self, round, logits):
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


@OURS.breaks("ACCEPT-01")
class SkipsTheRoot(TreeAccept):
    """accept_index lists the accepted drafts and leaves the root out."""

    def verdict(self, round, verified):
        _, lens, *rest = super().verdict(round, verified)
        drafts = np.pad(verified.accept_index[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return np.where(lens[:, None] > 1, drafts, verified.accept_index).ravel(), lens, *rest


@OURS.breaks("ACCEPT-02", "ACCEPT-01")
class CountsDraftsOnly(TreeAccept):
    """accept_lens is the number of correct drafts, without the bonus token."""

    def verdict(self, round, verified):
        index, lens, *rest = super().verdict(round, verified)
        return index, lens - 1, *rest


@OURS.breaks("ACCEPT-02")
class AcceptsNoDraft(TreeAccept):
    """Every draft is rejected: right, and as slow as without them."""

    def verify_greedy(self, round, logits):
        index = np.full((round.tree.batch_size, round.tree.width), -1, np.int32)
        index[:, 0] = np.arange(round.tree.batch_size) * round.tree.num_draft_tokens
        return self.verdict(round, verified_as(index, argmax_tokens(logits)))


@OURS.breaks("ACCEPT-02")
class TakesTheLastOfTies(TreeAccept):
    """Of equal logits the highest id is taken."""

    def verify_greedy(self, round, logits):
        last = logits.shape[1] - 1 - argmax_tokens(logits[:, ::-1])
        choices = np.where(argmax_tokens(logits) < 0, -1, last).astype(np.int32)
        return self.verdict(round, verify.verify_greedy(round.tree, choices))


@OURS.breaks("ACCEPT-05", "ACCEPT-04")
class DrawsFromTheWholeTarget(TreeAccept):
    """After a rejection the token is drawn from the target's distribution, the rejected drafts included."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        super().verify_sampling(round, probs, accept_coins, bonus_coins)
        return self.redrawn(round, probs, bonus_coins)

    def redrawn(self, round, probs, bonus_coins):
        verified, rows = round.verified, np.arange(round.tree.batch_size)
        last = verified.accept_index[rows, verified.accept_lens - 1]
        drawn = sample_tokens(probs[last], bonus_coins[rows, verified.accept_lens - 1])
        verified.predict[last] = np.where(verified.predict[last] < 0, -1, drawn)
        return self.verdict(round, verified)


@OURS.breaks("ACCEPT-04")
class TossesOneCoin(TreeAccept):
    """The coin that rejects a draft also draws the token in its place."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        return super().verify_sampling(round, probs, accept_coins, accept_coins)


@OURS.breaks("ACCEPT-04")
class FlattensTheTarget(TreeAccept):
    """A tiny constant against division by zero gives every token a little mass."""

    def verify_sampling(self, round, probs, accept_coins, bonus_coins):
        return super().verify_sampling(round, probs + 1e-3, accept_coins, bonus_coins)


@OURS.breaks("ACCEPT-04")
class TakesAnotherDraftsNumbers(TreeAccept):
    """A draft is verified against the distribution before its temperature, not against the one that it was drawn
    from."""

    def verify_drafted(self, round, probs, draft_probs, accept_coins, bonus_coins):
        return super().verify_drafted(round, probs, draft_probs**4, accept_coins, bonus_coins)


@OURS.breaks("ACCEPT-05", "ACCEPT-04")
class DrawsWhatTheDraftHadToo(TreeAccept):
    """After the rejection of a drawn draft the token is drawn from the whole target, not from what it has beyond the
    draft."""

    def verify_drafted(self, round, probs, draft_probs, accept_coins, bonus_coins):
        super().verify_drafted(round, probs, draft_probs, accept_coins, bonus_coins)
        return DrawsFromTheWholeTarget.redrawn(self, round, probs, bonus_coins)


@OURS.breaks("ACCEPT-04", "ACCEPT-02")
class ShowsAFailedTarget(TreeAccept):
    """Where the target gives no numbers, what argmax makes of NaN is emitted."""

    def verdict(self, round, verified):
        index, lens, predict, bonus = super().verdict(round, verified)
        return index, lens, np.maximum(predict, 0), bonus


@OURS.breaks("ACCEPT-13")
class BreaksTiesByHistory(TreeAccept):
    """Equal scores are distinguished by how many components the process has made, as an address or a clock would."""

    made = 0

    def __init__(self, config):
        super().__init__(config)
        type(self).made += 1
        self.turn = self.made

    def launch(self, batch):
        order = np.arange(batch.scores.shape[1])[:: 1 if self.turn % 2 else -1]
        return super().launch(batch._replace(scores=batch.scores + 1e-12 * order))


@OURS.breaks("ACCEPT-19")
class KeepsTheUnlikely(TreeAccept):
    """The order of the candidates is turned around: the least likely become nodes."""

    def launch(self, batch):
        return super().launch(batch._replace(scores=1 - batch.scores))


@OURS.breaks("ACCEPT-20")
class HidesTheRoot(TreeAccept):
    """The mask climbs one level too few: the deepest nodes do not see the root."""

    def links(self, round):
        first, sibling, seen, counts = super().links(round)
        nodes = round.tree.num_draft_tokens
        seen = seen.reshape(-1, nodes, nodes).copy()
        seen[:, :, 0] &= seen.sum(axis=2) < round.tree.width
        return first, sibling, seen.ravel(), counts


@OURS.breaks("ACCEPT-20")
class WalksTheSiblingsInACircle(TreeAccept):
    """The last child of a node points at the first again."""

    def links(self, round):
        first, sibling, *rest = super().links(round)
        parents, numbers = round.tree.parents, np.arange(round.tree.num_draft_tokens)
        eldest = first.reshape(parents.shape)[np.arange(len(parents))[:, None], np.maximum(parents, 0)]
        is_last = (sibling.reshape(parents.shape) < 0) & (parents >= 0) & (eldest < numbers)
        return first, np.where(is_last, eldest, sibling.reshape(parents.shape)).ravel(), *rest


@OURS.breaks("ACCEPT-21")
class FollowsTheUnlikely(TreeAccept):
    """A beam has the least likely candidates of its step."""

    def draft(self, batch, model):
        def turned(step, tokens, sources):
            ids, shares = model(step, tokens, sources)
            return ids[..., ::-1], 1 - shares[..., ::-1]

        return super().draft(batch, turned)


@OURS.breaks("ACCEPT-22")
class LeavesOutTheTokenThatReachesP(TreeAccept):
    """The token with which the mass reaches p is cut off."""

    def distribution(self, logits, temperature, top_k, top_p):
        probs = super().distribution(logits, temperature, top_k, top_p)
        for row, p in zip(probs, top_p, strict=True):
            kept = np.flatnonzero(row > 0)
            if p < 1 and len(kept) > 1:
                row[kept[row[kept].argmin()]] = 0
                row /= row.sum()
        return probs


@OURS.breaks("ACCEPT-23")
class TossesTheSameCoinsEveryRound(TreeAccept):
    """The position is left out of a coin's key."""

    def coins(self, seed, requests, seq_lens, width):
        return super().coins(seed, requests, 0 * seq_lens, width)


@OURS.breaks("ACCEPT-23")
class SharesACoin(TreeAccept):
    """One coin per position decides both about the draft and about the token in its place."""

    def coins(self, seed, requests, seq_lens, width):
        accept, _ = super().coins(seed, requests, seq_lens, width)
        return accept, accept


MUTANTS = (*OURS.mutants, *PLAIN)
