"""ACCEPT-06 and ACCEPT-16: where KV and outputs stand after the accepted path was moved to the front. ACCEPT-19 … 23:
which nodes a tree has and what they see, what is sampled from, and with which coins.

A checker gets a `AcceptMoment` (`accept/model.py`) and looks at it alone.
"""

from __future__ import annotations

import numpy as np

from ...harness.invariants import Finding, Outcome, checks
from ..expected import distribution, kept_scores, links_of, node_paths
from ..inputs import GARBAGE_IDS
from ..model import LAYERS, AcceptMoment
from .rounds import CONTRACT, FINISHES, LAUNCHES

_NOT_OWNED = "no row of the round owned it when it was launched"
_NOT_ITS_OWN = "a request would attend to KV that is not its own"
_READ_FIRST = "every source is read before it is overwritten"


@checks("ACCEPT-06", CONTRACT, "kv", on=FINISHES, general=True)
def slots_hold_their_tokens(m: AcceptMoment) -> Outcome:
    if m.wrong_kv is not None:
        row, position, layer = m.wrong_kv
        slot = int(m.model.table[row, position])
        was = f"slot {slot}, position {position} of row {row}, layer {layer}, holds {_content(m, slot, layer)}"
        should = "the KV of that position's token, after all tokens before it"
        return Finding(was, should, "every later token attends to it")
    if not m.live():
        return None
    answer, nodes = m.answer, m.round.nodes
    lanes = [(walk, lane, node) for walk in m.walks() for lane, node in enumerate(walk.path)]
    places = [walk.number * nodes + lane for walk, lane, _ in lanes]
    sources = [walk.number * nodes + node for walk, _, node in lanes]
    for name, got in answer.compacted.items():
        given = answer.given[name]
        if got.shape != given.shape:
            continue  # ACCEPT-18 says so
        wrong = got[places] != given[sources]
        if wrong.any():
            walk, lane, node = lanes[int(np.argwhere(wrong)[0, 0])]
            was = f"{name} of row {m.round.rows[walk.number]} at place {lane} is not that of node {node}"
            should = f"the outputs of the path {walk.path}, in this order"
            return Finding(was, should, "a token would be shown with what belongs to another one")
    return True


@checks("ACCEPT-16", CONTRACT, "kv", on=FINISHES)
def no_move_out_of_bounds(m: AcceptMoment) -> Outcome:
    answer = m.answer
    if answer.before is None or not answer.is_formed:
        return None
    home = {slot: number for number in m.live() for slot in m.round.batch.windows[number].tolist()}
    has_plan = answer.moves is not None
    finding = (_plan_in_bounds(m, home) if has_plan else None) or _writes_in_bounds(m, home)
    finding = finding or _sources_were_read_first(m) or (_plan_is_carried_out(m) if has_plan else None)
    return finding or True


def _plan_in_bounds(m: AcceptMoment, home: dict[int, int]) -> Finding | None:
    sources, targets = m.answer.moves
    written: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < m.model.num_slots:
                inside = f"a slot of the pool, 0 … {m.model.num_slots - 1}"
                return Finding(f"{name} slot {slot} of a move", inside, "it is memory outside the pool")
            if slot and slot not in home:
                was = f"{name} slot {slot} of a move, {_place_of(m, slot)}"
                return Finding(was, f"slots of the round's windows: {_windows(m)}", _NOT_OWNED)
        if target and (source == 0 or home[source] != home[target]):
            number = home[target]
            path = next((walk.path for walk in m.walks() if walk.number == number), m.answer.lanes(number))
            was = f"slot {source} is moved to slot {target}; {_path_in_words(m, number, path)}"
            return Finding(was, "moves inside one row's window", _NOT_ITS_OWN)
        if target and target in written:
            return Finding(f"slot {target} is written twice", "once", "which of the two stays is a matter of chance")
        if source and source in written and m.capabilities.in_order:
            pairs = list(zip(sources, targets, strict=True))
            was = f"slot {source} is read after it was written, by moves {pairs} in this order"
            return Finding(was, _READ_FIRST, "what is moved on is not what stood there")
        written.add(target)
    return None


def _plan_is_carried_out(m: AcceptMoment) -> Finding | None:
    sources, targets = m.answer.moves
    expected = m.answer.before.copy()
    expected[:, list(targets)] = m.answer.before[:, list(sources)]
    differs = (expected != m.answer.after)[:, 1:].any(axis=0)
    if differs.any():
        slot = int(differs.argmax()) + 1
        was = f"after the moves {list(zip(sources, targets, strict=True))[:12]} slot {slot} does not hold what they say"
        should = "each target holds what stood in its source before the first move"
        return Finding(was, should, "other moves are made than those that are checked")
    return None


def _writes_in_bounds(m: AcceptMoment, home: dict[int, int]) -> Finding | None:
    before, after = m.answer.before, m.answer.after
    for layer, slot in np.argwhere(before != after).tolist():
        if slot == 0:
            continue
        if slot not in home:
            was = f"slot {slot}, {_place_of(m, slot)}, was written"
            return Finding(was, f"writes to the round's windows: {_windows(m)}", _NOT_OWNED)
        window = m.round.batch.windows[home[slot]]
        if after[layer, slot] not in before[layer, window]:
            row = m.round.rows[home[slot]]
            was = f"slot {slot} of row {row}, layer {layer}, now holds {_content(m, slot, layer)}"
            return Finding(was, f"what stood in one of its row's slots {_listed(window)}", _NOT_ITS_OWN)
    return None


def _sources_were_read_first(m: AcceptMoment) -> Finding | None:
    """Check that every source was read before it was written:
    a lane that holds what was moved into its source has read too late."""
    before, after = m.answer.before, m.answer.after
    for number, path, _ in m.walks():
        window = m.round.batch.windows[number]
        for lane, node in enumerate(path):
            if node >= len(path) or path[node] == node:
                continue  # nothing was moved into its source
            if (after[:, window[lane]] != before[:, window[node]]).any():
                return Finding(
                    f"slot {window[lane]} does not hold what stood in slot {window[node]}; {_path_in_words(m, number, path)}",
                    _READ_FIRST,
                    "an accepted token's KV is lost, and its neighbour's is there twice",
                )
    return None


# -- words ------------------------------------------------------------------------------------------------------------


def _listed(slots: np.ndarray) -> str:
    return str(slots.tolist()) if len(slots) <= 12 else f"{slots[:12].tolist()} and {len(slots) - 12} more"


def _path_in_words(m: AcceptMoment, number: int, path: object) -> str:
    return f"row {m.round.rows[number]} accepts the path {path} in slots {_listed(m.round.batch.windows[number])}"


def _windows(m: AcceptMoment) -> str:
    shown = (f"row {m.round.rows[number]} {_listed(m.round.batch.windows[number])}" for number in m.live())
    return "; ".join(shown) or "there are none"


def _place_of(m: AcceptMoment, slot: int) -> str:
    found = np.argwhere(m.model.table == slot)
    if not len(found):
        return "which belongs to no row"
    row, position = found[0].tolist()
    return f"position {position} of row {row}"


def _content(m: AcceptMoment, slot: int, layer: int) -> str:
    """Say whose KV stands in a slot."""
    value = int(m.model.pools[layer, slot]) if m.answer.after is None else int(m.answer.after[layer, slot])
    for row, request in enumerate(m.model.requests):
        if value - layer in request.codes:
            return f"the KV of position {request.codes.index(value - layer)} of row {row}"
    if m.answer.before is not None:
        for number, row in enumerate(m.round.rows):
            nodes = np.flatnonzero(m.answer.before[layer, m.round.batch.windows[number]] == value)
            if len(nodes):
                return f"the KV of node {nodes[0]} of row {row}"
    if value < 0:
        return f"what was in slot {-value // LAYERS - 1}, which was never written"
    return "the KV of another request, or of a node that was not accepted"


# -- trees ------------------------------------------------------------------------------------------------------------


@checks("ACCEPT-19", CONTRACT, on=("launch", "launch-garbage"))
def the_best_candidates_are_kept(m: AcceptMoment) -> Outcome:
    round, found = m.round, None
    for number, row in enumerate(round.rows if round.garbage not in GARBAGE_IDS else ()):
        both = kept_scores(round.batch, number, round.tokens[number], round.parents[number])
        if both is None:
            continue
        found, (kept, best) = True, both
        wrong = next((at for at, pair in enumerate(zip(kept, best, strict=True)) if pair[0] != pair[1]), None)
        if wrong is not None:
            was = f"the tree of row {row} has nodes of the scores {_rounded(kept)}"
            should = f"{_rounded(best)}: the best of {round.batch.scores.shape[1]} candidates"
            return Finding(was, should, "the target verifies drafts that are less likely than others that it could")
    return found


def _rounded(scores: list[float]) -> str:
    return ", ".join(f"{score:.3g}" for score in scores[:12]) + (", …" if len(scores) > 12 else "")


@checks("ACCEPT-20", CONTRACT, "links", on=LAUNCHES)
def nodes_see_their_ancestors(m: AcceptMoment) -> Outcome:
    if m.links is None:
        return None
    round, nodes = m.round, m.round.nodes
    first, sibling, seen, counts = m.links
    for number, row in enumerate(round.rows):
        parents, depths = round.parents[number], round.depths[number]
        should_first, should_sibling, should_see = links_of(parents)
        there = [node for node in range(nodes) if depths[node] >= 0]
        if counts[number] != len(there):
            was = f"row {row} has {counts[number]} nodes"
            return Finding(was, f"{len(there)}", "one of them would not be verified")
        for node in there:
            at = number * nodes + node
            sees = [other for other in range(nodes) if seen[at * nodes + other]]
            ancestors = [other for other in range(nodes) if should_see[node][other]]
            if sees != ancestors:
                was = f"node {node} of row {row} attends to {sees}"
                return Finding(
                    was, f"{ancestors}, with parents {parents}", "its KV and logits are those of another text"
                )
            if (first[at], sibling[at]) != (should_first[node], should_sibling[node]):
                was = f"after node {node} of row {row} a walk finds the child {first[at]} and the sibling {sibling[at]}"
                should = f"{should_first[node]} and {should_sibling[node]}, with parents {parents}"
                return Finding(was, should, "a draft that is right is never looked at, or looked at twice")
    return True if round.rows else None


@checks("ACCEPT-21", CONTRACT, "beams", on=("draft",))
def drafts_follow_the_best(m: AcceptMoment) -> Outcome:
    if m.drafter is None or m.round is None:
        return None
    steps, topk, nodes = m.drafted
    why = "the draft's own choice is lost, and the target accepts fewer tokens"
    if m.drafter.strange:
        was = m.drafter.strange
        return Finding(was, "a token that was drafted there", "KV and hidden states of another path follow it")
    if len(m.drafter.levels) != steps:
        return Finding(f"the draft was asked {len(m.drafter.levels)} times", f"{steps}, once per step", why)
    for row, (tokens, parents) in enumerate(zip(m.round.tokens, m.round.parents, strict=True)):
        found = node_paths(tokens, parents)[1:]
        best = m.drafter.best(row, steps, nodes)
        if len(found) != nodes - 1 or set(found) != best:
            strange = sorted(set(found) - best, key=str)[:3]
            was = f"row {row} drafts {strange} in {steps} steps of {topk}, among {nodes - 1} nodes"
            return Finding(was, f"{sorted(best - set(found), key=str)[:3]}, which are likelier", why)
    return True


# -- what is sampled from, and with what ------------------------------------------------------------------------------


@checks("ACCEPT-22", CONTRACT, "parameters", on=("filter",))
def parameters_shape_the_distribution(m: AcceptMoment) -> Outcome:
    if m.filtered is None:
        return None
    for logits, probs, (temperature, top_k, top_p) in zip(
        *map(np.ndarray.tolist, m.filtered), m.parameters, strict=True
    ):
        should = distribution(logits, temperature, top_k, top_p)
        if should is None or np.allclose(probs, should, rtol=0, atol=1e-9, equal_nan=True):
            continue
        was = f"logits {logits} at temperature {temperature}, top_k {top_k}, top_p {top_p} give {_rounded(probs)}"
        return Finding(
            was, _rounded(should), "tokens are drawn that were excluded, or never drawn though they are allowed"
        )
    return True


@checks("ACCEPT-23", CONTRACT, "keyed_coins", on=("coins",))
def coins_are_keyed(m: AcceptMoment) -> Outcome:
    if m.coins is None:
        return None
    owners: dict[float, tuple[int, int, int, str]] = {}
    for key, given in m.coins.given.items():
        if len(set(given)) > 1:
            return Finding(f"{_coin(key)} is {given}", "one number", "the same position would be decided anew")
        if not 0 <= given[0] < 1:
            was = f"{_coin(key)} is {given[0]}"
            return Finding(was, "a number in [0, 1)", "it decides nothing, or always the same")
        other = owners.setdefault(given[0], key)
        if other != key:
            was = f"{_coin(key)} is {_coin(other)}"
            return Finding(was, "a coin of its own", "what it decides was decided by it before")
    uneven = m.coins.uneven()
    return (
        Finding(uneven, "even and independent coins", "speculation would change the distribution") if uneven else True
    )


def _coin(key: tuple[int, int, int, str]) -> str:
    seed, request, position, use = key
    return f"the {use} coin of request {request} at position {position} with seed {seed}"
