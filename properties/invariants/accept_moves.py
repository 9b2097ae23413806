"""ACCEPT-06 and ACCEPT-16: where KV and outputs stand after the accepted path was moved to the front.

A checker gets a `Moment` (`accept/moment.py`) and looks at it alone.
"""

from __future__ import annotations

import numpy as np

from ..accept.model import LAYERS
from ..accept.moment import Moment
from ..accept.operations import FINISHES
from .registry import Finding, Outcome, checks

CONTRACT = "accept"


@checks("ACCEPT-06", CONTRACT, "kv", on=FINISHES, general=True)
def slots_hold_their_tokens(m: Moment) -> Outcome:
    if m.wrong_kv is not None:
        row, position, layer = m.wrong_kv
        slot = int(m.model.table[row, position])
        return Finding(
            f"slot {slot}, position {position} of row {row}, layer {layer}, holds {_content(m, slot, layer)}",
            "the KV of that position's token, after all tokens before it",
            "every later token attends to it",
        )
    if not m.answer.compacted or not len(m.live()):
        return True if len(m.live()) else None
    return _outputs_follow(m)


def _outputs_follow(m: Moment) -> Outcome:
    answer, nodes = m.answer, m.round.nodes
    lanes = [
        (number, lane, node)
        for number in m.live()
        if answer.is_path[number]
        for lane, node in enumerate(answer.paths[number])
    ]
    numbers, places, sources = np.array(lanes, np.int64).reshape(-1, 3).T
    for name, given in answer.given.items():
        got = answer.compacted[name]
        if got.shape != given.shape:
            continue  # ACCEPT-18 says so
        wrong = got[numbers * nodes + places] != given[numbers * nodes + sources]
        if wrong.any():
            number, lane, node = lanes[int(np.argwhere(wrong)[0, 0])]
            return Finding(
                f"{name} of row {m.row_of(number)} at place {lane} is {_output_of(got[number * nodes + lane], given, nodes)}",
                f"that of node {node}, of the path {answer.paths[number]}",
                "a token would be shown with what belongs to another one",
            )
    return True


@checks("ACCEPT-16", CONTRACT, "kv", on=FINISHES)
def no_move_out_of_bounds(m: Moment) -> Outcome:
    answer = m.answer
    if answer.before is None or not answer.is_formed:
        return None
    home = {
        slot: (number, lane) for number in m.live() for lane, slot in enumerate(m.round.batch.windows[number].tolist())
    }
    finding = _plan_in_bounds(m, home) if answer.moves is not None else None
    finding = finding or _writes_in_bounds(m, home) or _sources_were_read_first(m)
    return finding or (_plan_is_carried_out(m) if answer.moves is not None else None) or True


def _plan_in_bounds(m: Moment, home: dict[int, tuple[int, int]]) -> Finding | None:
    sources, targets = m.answer.moves
    written: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < m.model.num_slots:
                return Finding(
                    f"{name} slot {slot} of a move",
                    f"a slot of the pool, 0 … {m.model.num_slots - 1}",
                    "it is memory of somebody else",
                )
            if slot and slot not in home:
                return Finding(
                    f"{name} slot {slot} of a move, {_place_of(m, slot)}",
                    f"slots of the round's windows: {_windows(m)}",
                    "no row of the round owned it when it was launched",
                )
        if target and (source == 0 or home[source][0] != home[target][0]):
            return Finding(
                f"slot {source} is moved to slot {target}; {_path_in_words(m, home[target][0])}",
                "moves inside one row's window",
                "a request would attend to another one's KV",
            )
        if target in written and target:
            return Finding(f"slot {target} is written twice", "once", "which of the two stays is a matter of chance")
        if source in written and source and m.capabilities.in_order:
            return Finding(
                f"slot {source} is read after it was written, by moves {list(zip(sources, targets, strict=True))} in this order",
                "every source is read before it is overwritten",
                "what is moved on is not what stood there",
            )
        written.add(target)
    return None


def _plan_is_carried_out(m: Moment) -> Finding | None:
    sources, targets = m.answer.moves
    expected = m.answer.before.copy()
    expected[:, list(targets)] = m.answer.before[:, list(sources)]
    differs = (expected != m.answer.after)[:, 1:].any(axis=0)
    if differs.any():
        slot = int(differs.argmax()) + 1
        return Finding(
            f"after the moves {list(zip(sources, targets, strict=True))[:12]} slot {slot} does not hold what they say",
            "each target holds what stood in its source before the first move",
            "other moves are made than those that are checked",
        )
    return None


def _writes_in_bounds(m: Moment, home: dict[int, tuple[int, int]]) -> Finding | None:
    before, after = m.answer.before, m.answer.after
    for layer, slot in np.argwhere(before != after).tolist():
        if slot == 0:
            continue
        if slot not in home:
            return Finding(
                f"slot {slot}, {_place_of(m, slot)}, was written",
                f"writes to the round's windows: {_windows(m)}",
                "no row of the round owned it when it was launched",
            )
        number = home[slot][0]
        window = m.round.batch.windows[number]
        if after[layer, slot] not in before[layer, window]:
            return Finding(
                f"slot {slot} of row {m.row_of(number)}, layer {layer}, now holds {_content(m, slot, layer)}",
                f"what stood in one of its row's slots {_listed(window)}",
                "a request would attend to KV that is not its own",
            )
    return None


def _sources_were_read_first(m: Moment) -> Finding | None:
    """A lane that holds what was moved into its source has read too late."""
    before, after = m.answer.before, m.answer.after
    for number in m.live():
        path, window = m.answer.paths[number], m.round.batch.windows[number]
        if not m.answer.is_path[number]:
            continue
        for lane, node in enumerate(path):
            if node >= len(path) or path[node] == node:
                continue  # nothing was moved into its source
            if (after[:, window[lane]] != before[:, window[node]]).any():
                return Finding(
                    f"slot {window[lane]} does not hold what stood in slot {window[node]}; {_path_in_words(m, number)}",
                    "every source is read before it is overwritten",
                    "an accepted token's KV is lost, and its neighbour's is there twice",
                )
    return None


# -- words ------------------------------------------------------------------------------------------------------------


def _listed(slots: np.ndarray) -> str:
    return str(slots.tolist()) if len(slots) <= 12 else f"{slots[:12].tolist()} and {len(slots) - 12} more"


def _path_in_words(m: Moment, number: int) -> str:
    """What a live row has accepted, and where."""
    window = m.round.batch.windows[number]
    return f"row {m.row_of(number)} accepts the path {m.answer.paths[number]} in slots {_listed(window)}"


def _windows(m: Moment) -> str:
    shown = (f"row {m.row_of(number)} {_listed(m.round.batch.windows[number])}" for number in m.live())
    return "; ".join(shown) or "there are none"


def _place_of(m: Moment, slot: int) -> str:
    """Whose slot it is."""
    found = np.argwhere(m.model.table == slot)
    if not len(found):
        return "which nobody has"
    row, position = found[0].tolist()
    return f"position {position} of row {row}"


def _content(m: Moment, slot: int, layer: int) -> str:
    """Whose KV stands in a slot, in words."""
    value = int(m.model.pools[layer, slot]) if m.answer.after is None else int(m.answer.after[layer, slot])
    for row, request in enumerate(m.model.requests):
        if value - layer in request.codes:
            return f"the KV of position {request.codes.index(value - layer)} of row {row}"
    if m.answer.before is not None:
        for number in range(len(m.round.rows)):
            window = m.round.batch.windows[number]
            nodes = np.flatnonzero(m.answer.before[layer, window] == value)
            if len(nodes):
                return f"the KV of node {nodes[0]} of row {m.row_of(number)}"
    if value < 0:
        return f"what was in slot {-value // LAYERS - 1}, where nobody has written"
    return "the KV of another request, or of a node that was not accepted"


def _output_of(values: np.ndarray, given: np.ndarray, nodes: int) -> str:
    """Which node's output that is, in words."""
    for flat, own in enumerate(given):
        if np.array_equal(values, own):
            return f"that of node {flat % nodes} of row number {flat // nodes} of the batch"
    return "that of no node"
