"""ACCEPT-01 … of acceptance: what a verify tree and its verdict must be. What is moved behind it stands in
`moves.py`.

A checker gets a `AcceptMoment` (`accept/model.py`) and looks at it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...harness.invariants import Finding, Outcome, checks, first_difference
from ..inputs import FIRST_TOLERANCE, SECOND_TOLERANCE
from ..model import AcceptMoment, Walk

if TYPE_CHECKING:
    from ...harness.trial import Trial

CONTRACT = "accept"
LAUNCHES = ("launch", "launch-garbage", "propose")
SAMPLED = ("sample", "sample-drafted")
FINISHES = ("greedy", *SAMPLED, "fail-target")
DISTRIBUTIONS = ("distribution", "distribution-drafted")

_NEVER_SAID = "the target would never say it"


@checks("ACCEPT-01", CONTRACT, on=FINISHES)
def accepted_nodes_are_a_path(m: AcceptMoment) -> Outcome:
    lengths = {walk.number: len(walk.path) for walk in m.walks()}
    for number in m.live():
        answer, round = m.answer, m.round
        lanes = answer.lanes(number)
        if number in lengths and set(lanes[lengths[number] :]) <= {-1}:
            continue
        shown = [node - number * round.nodes if node >= 0 else -1 for node in lanes]
        return Finding(
            f"row {round.rows[number]} accepts nodes {shown}, {answer.accept_lens[number]} of them, "
            f"in a tree with parents {round.parents[number]}",
            "the root, then each time a child of the node before, then -1 to the end",
            "tokens of different branches would follow each other, and KV of neither prefix",
        )
    return True if m.live() else None


@checks("ACCEPT-02", CONTRACT, on=FINISHES)
def as_much_is_emitted_as_is_correct(m: AcceptMoment) -> Outcome:
    for number in m.live():
        answer, round = m.answer, m.round
        length, room = answer.accept_lens[number], min(answer.width, round.nodes)
        if not 1 <= length <= room:
            return Finding(
                f"row {round.rows[number]} emits {length} tokens",
                f"1 to {room}: accept_index has {answer.width} lanes, the row has slots for {round.nodes} nodes",
                "a round emits the bonus token at least, and has reserved no more than a slot per node",
            )
    findings = (_follows_the_target(m, walk) for walk in m.walks() if not m.fails(walk))
    return next(filter(None, findings), True if m.live() else None)


def _follows_the_target(m: AcceptMoment, walk: Walk) -> Finding | None:
    """Return whether the drafts of the path and one more are emitted;
    greedily, the target's choices while there is a draft of them."""
    number, path, emitted = walk
    row, tokens = m.round.rows[number], m.round.tokens[number]
    drafts = [tokens[node] for node in path[1:]]
    if emitted[:-1] != drafts:
        was = f"row {row} emits {emitted} along drafts {drafts}"
        should = "the accepted drafts, then the bonus token"
        return Finding(was, should, "the KV that is kept belongs to other tokens than those that are shown")
    if m.wanted is None:
        return None
    chosen = [m.wanted[number][node] for node in path]
    if emitted != chosen:
        was = f"row {row} emits {emitted} after nodes {path}"
        should = f"{chosen}, the target's choices (the lowest id of the greatest logit)"
        return Finding(was, should, "greedy speculation must not change the output")
    missed = [child for child in m.round.children(number, path[-1]) if tokens[child] == chosen[-1]]
    if missed:
        return Finding(
            f"row {row} stops after {len(drafts)} correct drafts, although node {missed[0]} is what the target says next",
            f"{len(path)} correct drafts or more",
            "a draft that is right and not accepted is a round lost",
        )
    return None


@checks("ACCEPT-04", CONTRACT, "sampling", on=(*SAMPLED, "fail-target", *DISTRIBUTIONS))
def emitted_as_the_target_would(m: AcceptMoment) -> Outcome:
    if m.shares is not None:
        return _has_the_shares(m)
    if m.probs is None or not m.live():
        return None
    for number, path, emitted in m.walks():
        row = m.round.rows[number]
        for node, token in zip(path, emitted, strict=True):
            if m.failing[number][node]:
                if token != -1:
                    was = f"row {row} emits token {token} after node {node}, where the target gives no numbers"
                    return Finding(was, "-1: nothing", "a token that was not computed would be shown, and cached")
                break
            masses = m.probs[number * m.round.nodes + node]
            mass = masses[token] if 0 <= token < m.config.vocab_size else 0.0
            if not mass > 0:
                shown = ", ".join(f"{token}: {masses[token]:.3g}" for token in np.flatnonzero(masses > 0)[:8])
                was = f"row {row} emits token {token} after node {node}, where it has probability {mass:g}"
                return Finding(was, f"a token with mass: {shown}", _NEVER_SAID)
    return True


def _has_the_shares(m: AcceptMoment) -> Outcome:
    if m.shares.impossible is not None:
        row, token = m.shares.impossible
        return Finding(f"row {row} of many emits token {token} of probability 0", "a token with mass", _NEVER_SAID)
    measured = [
        (f"token {token} is emitted first", share, should, FIRST_TOLERANCE)
        for token, (share, should) in m.shares.first.items()
    ] + [
        (f"draft {one} and then draft {two} are accepted", share, should, SECOND_TOLERANCE)
        for (one, two), (share, should) in m.shares.second.items()
    ]
    for what, share, should, tolerance in measured:
        if abs(share - should) > tolerance + 1e-9:
            was = f"{what} in a share of {share:.3f} of all coins"
            should = f"{should:.3f}, give or take {tolerance:.3f}"
            return Finding(was, should, "speculation would change the distribution of the output")
    return True


@checks("ACCEPT-05", CONTRACT, "sampling", on=SAMPLED)
def rejected_drafts_do_not_come_back(m: AcceptMoment) -> Outcome:
    applied = None
    for number, path, emitted in m.walks():
        rejected = [m.round.tokens[number][child] for child in m.round.children(number, path[-1])]
        applied = applied or bool(rejected) or None
        if emitted[-1] in rejected:
            return Finding(
                f"row {m.round.rows[number]} rejects the drafts {rejected} after node {path[-1]}, and then emits {emitted[-1]}",
                "another token, from what the target has beside them",
                "a draft that was not accepted comes back with more than its share; where the draft's numbers are none, "
                "the target alone decides",
            )
    return applied


@checks("ACCEPT-07", CONTRACT, on=LAUNCHES)
def positions_have_no_hole(m: AcceptMoment) -> Outcome:
    round = m.round
    for number, row in enumerate(round.rows):
        start, last = int(round.batch.seq_lens[number]), round.batch.max_position
        for node, (depth, position) in enumerate(zip(round.depths[number], round.positions[number], strict=True)):
            if depth >= 0 and position != min(start + depth, last):
                was = f"node {node} of row {row}, {depth} below its root, is at position {position}"
                should = f"{min(start + depth, last)}: the row has {start} tokens, its last position is {last}"
                return Finding(was, should, "the model would see a hole, or a token twice")
    return True if round.rows else None


@checks("ACCEPT-09", CONTRACT, "raw_drafts", on=LAUNCHES)
def the_target_sees_real_drafts(m: AcceptMoment) -> Outcome:
    round, vocab = m.round, m.config.vocab_size
    find_stranger = _not_proposed if round.is_proposed else _not_drafted
    for number, row in enumerate(round.rows):
        tokens, depths = round.tokens[number], round.depths[number]
        for node, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            if depth >= 0 and not 0 <= token < vocab:
                was = f"node {node} of row {row} has token {token}"
                return Finding(was, f"an id in 0 … {vocab - 1}, or no node", "the embedding is read out of bounds")
        strange = find_stranger(m, number)
        if strange is not None:
            return Finding(
                f"node {strange} of row {row}, token {tokens[strange]}, is no draft below node {round.parents[number][strange]}",
                "nodes are what was drafted, below what it was drafted after; only ids outside the vocabulary are replaced",
                "drafts that are good are lost, and the target's work with them",
            )
        missing = depths.count(-1)
        if not round.garbage and not round.is_proposed and missing:
            was = f"row {row} has {missing} nodes fewer than its tree"
            return Finding(was, f"{round.nodes} nodes", "good drafts are lost")
    return True if round.rows else None


def _not_proposed(m: AcceptMoment, number: int) -> int | None:
    """Return the first node that is not the one that was proposed."""
    round, there = m.round, [True]
    proposed = zip(round.batch.parents[number].tolist(), round.batch.tokens[number].tolist(), strict=True)
    for node, (parent, token) in enumerate(proposed, 1):
        there.append(parent >= 0 and there[parent])
        same = (round.parents[number][node], round.tokens[number][node]) == (parent, token)
        if there[node] != (round.depths[number][node] >= 0) or (there[node] and not same):
            return node
    return None


def _not_drafted(m: AcceptMoment, number: int) -> int | None:
    """Return the first node that is no candidate below its parent."""
    round, vocab = m.round, m.config.vocab_size
    tokens = round.batch.tokens[number].tolist()
    below: dict[int, list[int]] = {}
    for candidate, parent in enumerate(round.batch.parents[number].tolist()):
        below.setdefault(parent, []).append(candidate)
    could_be: list[set[int]] = [{-1}]
    for node in range(1, round.nodes):
        parent, token = round.parents[number][node], round.tokens[number][node]
        could_be.append(
            {
                candidate
                for above in (could_be[parent] if parent >= 0 else ())
                for candidate in below.get(above, ())
                if tokens[candidate] == token or not 0 <= tokens[candidate] < vocab
            }
        )
        if parent >= 0 and not could_be[node]:
            return node
    return None


@checks("ACCEPT-13", CONTRACT, twin="on another rank")
def ranks_agree(runs: tuple[Trial, Trial]) -> Outcome:
    found = first_difference(runs)
    if found is not None:
        return Finding(
            "answer {} is {} on one rank and {} on the next".format(*found),
            "the same trees, verdicts and moves",
            "ranks that go different ways compute with each other's halves, or wait for each other for ever",
        )
    return True


@checks("ACCEPT-14", CONTRACT, "constraints", on=FINISHES)
def nothing_forbidden_is_accepted(m: AcceptMoment) -> Outcome:
    if m.round.states is None or not m.live():
        return None
    for number, path, emitted in m.walks():
        for node, token in zip(path, emitted, strict=True):
            if token == -1 and m.failing[number][node]:
                break
            state = m.round.states[number][node]
            allowed = np.flatnonzero(m.round.table[state] >= 0).tolist()
            if token not in allowed:
                return Finding(
                    f"row {m.round.rows[number]} emits token {token} after node {node} of the path {path}, in state {state}",
                    f"one of {allowed}",
                    "the output breaks its grammar, and the grammar cannot go on from there",
                )
    return True


@checks("ACCEPT-18", CONTRACT, on=FINISHES)
def buffers_keep_their_own_width(m: AcceptMoment) -> Outcome:
    answer, round = m.answer, m.round
    rows, nodes = round.num_rows, round.nodes
    if not answer.is_formed:
        sizes = [len(part) for part in (answer.accept_index, answer.accept_lens, answer.predict, answer.bonus)]
        was = f"accept_index, accept_lens, predict and bonus have {sizes} entries for {rows} rows of {nodes} nodes"
        should = f"[{rows} · width, {rows}, {rows * nodes}, {rows}]"
        return Finding(was, should, "rows of one width are read with another")
    if not round.rows:
        return None
    if answer.width < round.deepest:
        was = f"accept_index has {answer.width} lanes per row, but a path may have {round.deepest} nodes"
        should = "the width of the round's own shape, whatever is configured now"
        return Finding(was, should, "long paths are cut, or run into the next row")
    for number, row in enumerate(round.rows):
        first, last = number * nodes, (number + 1) * nodes - 1
        foreign = [node for node in answer.lanes(number) if node != -1 and not first <= node <= last]
        if foreign:
            was = f"row {row} accepts the flat node {foreign[0]}"
            return Finding(was, f"nodes {first} … {last}: rows have {nodes} nodes", "it is another row's node")
    for walk in m.walks():
        number, path, emitted = walk
        row, bonus = round.rows[number], answer.bonus[number]
        if m.fails(walk) and not 0 <= bonus < m.config.vocab_size:
            was = f"the bonus token of row {row}, whose target has failed, is {bonus}"
            return Finding(
                was, "any token of the vocabulary", "a step in flight reads its embedding before the row ends"
            )
        if not m.fails(walk) and bonus != emitted[-1]:
            was = f"the bonus token of row {row} is {bonus}"
            should = f"{emitted[-1]}, emitted after the last node of the path {path}"
            return Finding(was, should, "the next round would start from a token that was not emitted")
    for name, given in answer.given.items():
        if answer.compacted[name].shape != given.shape:
            was = f"{name} has shape {list(answer.compacted[name].shape)} after compaction"
            should = f"{list(given.shape)}: {rows} rows of {nodes} nodes"
            return Finding(was, should, "the stride of outputs is that of the round, before and after")
    return True
