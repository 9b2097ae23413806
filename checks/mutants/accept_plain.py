"""Planted defects of acceptance in the plain component, which has what ours does not: grammars, known draft
distributions and ordered moves."""

from ...properties.accept.plain import PlainAccept
from .planting import Defects

PLAIN = Defects("accept", PlainAccept)


@PLAIN.breaks("ACCEPT-14")
class MasksTheRootOnly(PlainAccept):
    """The grammar is asked for the root's next token alone."""

    def next_state(self, round, state, token):
        return -1

    def allowed(self, round, state):
        return [True] * self.vocab_size if state < 0 else super().allowed(round, state)


@PLAIN.breaks("ACCEPT-02", "ACCEPT-14")
class StaysInTheRootsState(PlainAccept):
    """All nodes are masked as the root is: the grammar does not move on along the path."""

    def next_state(self, round, state, token):
        return state


@PLAIN.breaks("ACCEPT-14")
class MasksTheBonusOnly(PlainAccept):
    """Drafts are matched before the grammar is asked, what is drawn in their place after it."""

    def verify_greedy(self, round, logits):
        table, round.table = round.table, None
        answer = super().verify_greedy(round, logits)
        round.table = table
        return answer


@PLAIN.breaks("ACCEPT-05")
class ReemitsWithoutADraft(PlainAccept):
    """A draft distribution of NaN or zeros rejects the draft, and the token is drawn from the whole target."""

    def from_target(self, tokens, children, target, coin, bonus_coin):
        if len(children) == 1:
            return -1, self.drawn(target, bonus_coin)
        return super().from_target(tokens, children, target, coin, bonus_coin)


@PLAIN.breaks("ACCEPT-05", "ACCEPT-04")
class TrustsBrokenDrafts(PlainAccept):
    """NaN in a draft's distribution makes the comparison false and the residual empty: the first id is emitted."""

    def is_distribution(self, probs):
        return True

    def from_draft(self, child, token, target, draft, coin, bonus_coin):
        if all(q == q and 0 <= q < 2 for q in draft) and sum(draft) > 0:
            return super().from_draft(child, token, target, draft, coin, bonus_coin)
        return -1, 0


@PLAIN.breaks("ACCEPT-04")
class DrawsFromTheTargetAlone(PlainAccept):
    """After a rejected draft the token comes from the target without the draft, not from what the target has over the
    draft."""

    def beyond(self, target, draft):
        return target[:]


@PLAIN.breaks("ACCEPT-04")
class ComparesWithoutTheDraft(PlainAccept):
    """A draft that was drawn from a distribution is accepted with the target's probability alone."""

    def from_draft(self, child, token, target, draft, coin, bonus_coin):
        if coin < target[token]:
            return child, token
        for masses in (self.beyond(target, draft), target[:]):
            masses[token] = 0.0
            if sum(masses) > 0:
                return -1, self.drawn(masses, bonus_coin)
        return child, token


@PLAIN.breaks("ACCEPT-04")
class AcceptsAtACoinOfZero(PlainAccept):
    """A coin is compared with <= instead of <: a coin of exactly 0 accepts a draft of probability 0."""

    def from_target(self, tokens, children, target, coin, bonus_coin):
        if coin == 0 and len(children):
            return children[0], tokens[children[0]]
        return super().from_target(tokens, children, target, coin, bonus_coin)


@PLAIN.breaks("ACCEPT-16")
class PlansBackwards(PlainAccept):
    """Moves are made one after the other, but the list begins at the end of the path."""

    def moves(self, round):
        sources, targets = super().moves(round)
        return sources[::-1], targets[::-1]


@PLAIN.breaks("ACCEPT-16")
class MovesDeadLanes(PlainAccept):
    """Lanes past the end of the path are moved too: -1 is the last slot of the last row's window."""

    def moves(self, round):
        flat = [slot for window in round.windows for slot in window]
        return [flat[node] for node in self.index(round)], flat


@PLAIN.breaks("ACCEPT-16")
class MovesWholePages(PlainAccept):
    """KV is moved by pages of four slots, though paths branch inside them."""

    def move(self, round, pools):
        for source, target in zip(*self.moves(round), strict=True):
            begin, end = (slot // 4 * 4 for slot in (source, target))
            width = min(4, pools.shape[1] - max(begin, end))
            pools[:, end : end + width] = pools[:, begin : begin + width]
        return pools


@PLAIN.breaks("ACCEPT-16")
class MovesOneSlotTooMany(PlainAccept):
    """A row's move ends one lane late, behind its window."""

    def moves(self, round):
        sources, targets = super().moves(round)
        return [*sources, *sources[-1:]], [*targets, *(target + 1 for target in targets[-1:])]


MUTANTS = tuple(PLAIN.mutants)
