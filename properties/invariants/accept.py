"""ACCEPT-01 … of acceptance: what a verify tree and its verdict must be. What is moved behind it stands in `accept_moves.py`.

A checker gets a `Moment` (`accept/moment.py`) and looks at it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..accept.moment import Moment
from ..accept.operations import (
    FINISHES,
    LAUNCHES,
    SAMPLED,
    Distribution,
    DistributionDrafted,
    FailTarget,
)
from .registry import Finding, Outcome, checks

if TYPE_CHECKING:
    from ..harness.trial import Trial

CONTRACT = "accept"


@checks("ACCEPT-01", CONTRACT, on=FINISHES)
def accepted_nodes_are_a_path(m: Moment) -> Outcome:
    for number in m.live():
        path, answer, round = m.answer.paths[number], m.answer, m.round
        lanes = answer.accept_index[number * answer.width : (number + 1) * answer.width]
        if answer.is_path[number] and set(lanes[len(path) :]) <= {-1}:
            continue
        offset = number * round.nodes
        shown = [node - offset if node >= 0 else -1 for node in lanes]
        return Finding(
            f"row {m.row_of(number)} accepts nodes {shown}, {answer.accept_lens[number]} of them, "
            f"in a tree with parents {round.parents[number]}",
            "the root, then each time a child of the node before, then -1 to the end",
            "tokens of different branches would follow each other, and KV of neither prefix",
        )
    return True if len(m.live()) else None


@checks("ACCEPT-02", CONTRACT, on=FINISHES)
def as_much_is_emitted_as_is_correct(m: Moment) -> Outcome:
    applied = False
    for number in m.live():
        answer, round, row = m.answer, m.round, m.row_of(number)
        length, room = answer.accept_lens[number], min(answer.width, round.nodes)
        if not 1 <= length <= room:
            return Finding(
                f"row {row} emits {length} tokens",
                f"1 to {room}: accept_index has {answer.width} lanes, the row has slots for {round.nodes} nodes",
                "a round emits the bonus token at least, and has reserved no more than a slot per node",
            )
        applied = True
        if not answer.is_path[number] or m.fails(number):
            continue
        finding = _follows_the_target(m, number)
        if finding is not None:
            return finding
    return True if applied else None


def _follows_the_target(m: Moment, number: int) -> Finding | None:
    """Emitted are the drafts of the path and one more; greedily, the target's choices, for as long as there is a draft of them."""
    answer, round, row = m.answer, m.round, m.row_of(number)
    path, tokens = answer.paths[number], round.tokens[number]
    emitted = [answer.predict[number * round.nodes + node] for node in path]
    if emitted[:-1] != [tokens[node] for node in path[1:]]:
        return Finding(
            f"row {row} emits {emitted} along drafts {[tokens[node] for node in path[1:]]}",
            "the accepted drafts, then the bonus token",
            "the KV that is kept belongs to other tokens than those that are shown",
        )
    if m.wanted is None:
        return None
    wanted = m.wanted[number]
    chosen = [wanted[node] for node in path]
    if emitted != chosen:
        return Finding(
            f"row {row} emits {emitted} after nodes {path}",
            f"{chosen}, the target's choices (the lowest id of the greatest logit)",
            "greedy speculation must not change the output",
        )
    missed = [child for child in round.children(number, path[-1]) if tokens[child] == chosen[-1]]
    if missed:
        return Finding(
            f"row {row} stops after {len(path) - 1} correct drafts, although node {missed[0]} is what the target says next",
            f"{len(path)} correct drafts or more",
            "a draft that is right and not accepted is a round lost",
        )
    return None


@checks("ACCEPT-04", CONTRACT, "sampling", on=(*SAMPLED, FailTarget, Distribution, DistributionDrafted))
def emitted_as_the_target_would(m: Moment) -> Outcome:
    if m.shares is not None:
        return _has_the_shares(m)
    if m.probs is None or not len(m.live()):
        return None
    nodes = m.round.nodes
    for number in m.live():
        if not m.answer.is_path[number]:
            continue
        for node in m.answer.paths[number]:
            token = m.answer.predict[number * nodes + node]
            if m.failing and m.failing[number][node]:
                if token != -1:
                    return Finding(
                        f"row {m.row_of(number)} emits token {token} after node {node}, where the target gives no numbers",
                        "-1: nothing",
                        "a token that nobody computed would be shown, and cached",
                    )
                break
            mass = m.probs[number * nodes + node, token] if 0 <= token < m.config.vocab_size else 0.0
            if not mass > 0:
                return Finding(
                    f"row {m.row_of(number)} emits token {token} after node {node}, where it has probability {mass:g}",
                    f"a token with mass: {_masses(m.probs[number * nodes + node])}",
                    "the target would never say it",
                )
    return True


def _has_the_shares(m: Moment) -> Outcome:
    shares = m.shares
    if shares.impossible is not None:
        row, token = shares.impossible
        return Finding(
            f"row {row} of many emits token {token} of probability 0",
            "a token with mass",
            "the target would never say it",
        )
    for what, found, tolerance in (
        ("token {} is emitted first", shares.first, shares.first_tolerance),
        ("draft {} and then draft {} are accepted", shares.second, shares.second_tolerance),
    ):
        for key, (share, should) in found.items():
            if abs(share - should) > tolerance + 1e-9:
                return Finding(
                    f"{what.format(*(key if isinstance(key, tuple) else (key,)))} in a share of {share:.3f} of all coins",
                    f"{should:.3f}, give or take {tolerance:.3f}",
                    "speculation would change the distribution of the output",
                )
    return True


@checks("ACCEPT-05", CONTRACT, "sampling", on=SAMPLED)
def rejected_drafts_do_not_come_back(m: Moment) -> Outcome:
    applied = False
    for number in m.live():
        if not m.answer.is_path[number]:
            continue
        last = m.answer.paths[number][-1]
        children = m.round.children(number, last)
        rejected = [m.round.tokens[number][child] for child in children]
        token = m.answer.predict[number * m.round.nodes + last]
        applied = applied or bool(rejected)
        if token in rejected:
            return Finding(
                f"row {m.row_of(number)} rejects the drafts {rejected} after node {last}, and then emits {token}",
                "another token, from what the target has beside them",
                "a draft that was not accepted comes back with more than its share; where the draft's numbers are none, "
                "the target alone decides",
            )
    return True if applied else None


@checks("ACCEPT-07", CONTRACT, on=LAUNCHES)
def positions_have_no_hole(m: Moment) -> Outcome:
    round = m.round
    for number, row in enumerate(round.rows):
        start, last = int(round.batch.seq_lens[number]), round.batch.max_position
        for node, position in enumerate(round.positions[number]):
            should = min(start + round.depths[number][node], last)
            if round.present[number][node] and position != should:
                return Finding(
                    f"node {node} of row {row}, {round.depths[number][node]} below its root, is at position {position}",
                    f"{should}: the row has {start} tokens, its last position is {last}",
                    "the model would see a hole, or a token twice",
                )
    return True if round.rows else None


@checks("ACCEPT-09", CONTRACT, "raw_drafts", on=LAUNCHES)
def the_target_sees_real_drafts(m: Moment) -> Outcome:
    round, vocab = m.round, m.config.vocab_size
    for number, row in enumerate(round.rows):
        for node, token in enumerate(round.tokens[number]):
            if round.present[number][node] and not 0 <= token < vocab:
                return Finding(
                    f"node {node} of row {row} has token {token}",
                    f"an id in 0 … {vocab - 1}, or no node",
                    "the embedding is read out of bounds",
                )
        strange = _not_drafted(m, number)
        if strange is not None:
            return Finding(
                f"node {strange} of row {row}, token {round.tokens[number][strange]}, is no draft below node "
                f"{round.parents[number][strange]}",
                "nodes are what was drafted, below what it was drafted after; only ids outside the vocabulary are replaced",
                "drafts that are good are lost, and the target's work with them",
            )
        missing = round.nodes - sum(round.present[number])
        if missing and not round.garbage and not round.is_proposed:
            return Finding(
                f"row {row} has {missing} nodes fewer than its tree", f"{round.nodes} nodes", "good drafts are lost"
            )
    return True if round.rows else None


def _not_drafted(m: Moment, number: int) -> int | None:
    """The first node that is no candidate below its parent (as a proposal: not the node that was proposed)."""
    round, vocab = m.round, m.config.vocab_size
    tokens, parents = round.batch.tokens[number].tolist(), round.batch.parents[number].tolist()
    if round.is_proposed:
        there = [True]
        for node, parent in enumerate(parents, 1):
            there.append(parent >= 0 and there[parent])
            same = (round.parents[number][node], round.tokens[number][node]) == (parent, tokens[node - 1])
            if there[node] != round.present[number][node] or (there[node] and not same):
                return node
        return None
    below: dict[int, list[int]] = {}
    for candidate, parent in enumerate(parents):
        below.setdefault(parent, []).append(candidate)
    could_be: list[set[int]] = [{-1}]
    for node in range(1, round.nodes):
        parent, token = round.parents[number][node], round.tokens[number][node]
        if parent < 0:
            could_be.append(set())
            continue
        found = {
            candidate
            for above in could_be[parent]
            for candidate in below.get(above, ())
            if tokens[candidate] == token or not 0 <= tokens[candidate] < vocab
        }
        if not found:
            return node
        could_be.append(found)
    return None


@checks("ACCEPT-13", CONTRACT, twin="on another rank")
def ranks_agree(runs: tuple[Trial, Trial]) -> Outcome:
    first, second = runs
    for number, (one, other) in enumerate(zip(first.transcript, second.transcript, strict=False), 1):
        if one != other:
            return Finding(
                f"answer {number} is {one} on one rank and {other} on the next",
                "the same trees, verdicts and moves",
                "ranks that go different ways compute with each other's halves, or wait for each other for ever",
            )
    return True


@checks("ACCEPT-14", CONTRACT, "constraints", on=FINISHES)
def nothing_forbidden_is_accepted(m: Moment) -> Outcome:
    if m.round.states is None or not len(m.live()):
        return None
    for number in m.live():
        if not m.answer.is_path[number]:
            continue
        path, states = m.answer.paths[number], m.round.states[number]
        for node in path:
            token = m.answer.predict[number * m.round.nodes + node]
            if token == -1 and m.failing and m.failing[number][node]:
                break
            allowed = m.round.table[states[node]] >= 0
            if not (0 <= token < m.config.vocab_size and allowed[token]):
                return Finding(
                    f"row {m.row_of(number)} emits token {token} after node {node} of the path {path}, in state {states[node]}",
                    f"one of {np.flatnonzero(allowed).tolist()}",
                    "the output breaks its grammar, and the grammar cannot go on from there",
                )
    return True


@checks("ACCEPT-18", CONTRACT, on=FINISHES)
def buffers_keep_their_own_width(m: Moment) -> Outcome:
    answer, round = m.answer, m.round
    rows, nodes = round.num_rows, round.nodes
    if not answer.is_formed:
        sizes = [len(part) for part in (answer.accept_index, answer.accept_lens, answer.predict, answer.bonus)]
        return Finding(
            f"accept_index, accept_lens, predict and bonus have {sizes} entries for {rows} rows of {nodes} nodes",
            f"[{rows} · width, {rows}, {rows * nodes}, {rows}]",
            "rows of one width are read with another",
        )
    if not len(round.rows):
        return None
    if answer.width < round.deepest:
        return Finding(
            f"accept_index has {answer.width} lanes per row, but a path may have {round.deepest} nodes",
            "the width of the round's own shape, whatever is configured now",
            "long paths are cut, or run into the next row",
        )
    for number in m.live():
        finding = _row_reads_its_own(m, number)
        if finding is not None:
            return finding
    for name, given in answer.given.items():
        if answer.compacted[name].shape != given.shape:
            return Finding(
                f"{name} has shape {list(answer.compacted[name].shape)} after compaction",
                f"{list(given.shape)}: {rows} rows of {nodes} nodes",
                "the stride of outputs is that of the round, before and after",
            )
    return True


def _row_reads_its_own(m: Moment, number: int) -> Finding | None:
    answer, nodes, row = m.answer, m.round.nodes, m.row_of(number)
    lanes = answer.accept_index[number * answer.width : (number + 1) * answer.width]
    foreign = [node for node in lanes if node != -1 and not number * nodes <= node < (number + 1) * nodes]
    if foreign:
        return Finding(
            f"row {row} accepts the flat node {foreign[0]}",
            f"nodes {number * nodes} … {(number + 1) * nodes - 1}: rows have {nodes} nodes",
            "it is another row's node",
        )
    if not answer.is_path[number] or m.fails(number):
        return None
    last = answer.predict[number * nodes + answer.paths[number][-1]]
    if answer.bonus[number] != last:
        return Finding(
            f"the bonus token of row {row} is {answer.bonus[number]}",
            f"{last}, emitted after the last node of the path {answer.paths[number]}",
            "the next round would start from a token that was not emitted",
        )
    return None


# -- words ------------------------------------------------------------------------------------------------------------


def _masses(probs: np.ndarray) -> str:
    return ", ".join(f"{token}: {probs[token]:.3g}" for token in np.flatnonzero(probs > 0)[:8])
