"""DRAFT-06 to 10 of engines: budgets of drafts, and the confidences by which they are chosen and spent."""

from __future__ import annotations

from ...harness.invariants import Finding, Outcome, checks
from ..budget import are_valid, passed_over, rates, survival_of
from ..model import ModelFlight
from ..observation import EngineMoment

CONTRACT = "engine"


@checks("DRAFT-06", CONTRACT, "budgets", on=("plan", "commit"))
def the_budget_is_spent_and_kept(m: EngineMoment) -> Outcome:
    if m.flight is not None and m.flight.budget is not None and m.flight.budget < 0:
        return Finding(f"a budget of {m.flight.budget} drafts", "0 at least", "it counts drafts")
    flight = m.committed
    if flight is None or not flight.chosen:
        return None
    room = sum(row.drafts for row in flight.rows)
    for chosen in flight.chosen:
        for row, own in zip(flight.rows, chosen.lengths, strict=True):
            if not 0 <= own <= row.drafts:
                return Finding(
                    f"{row.life.name} verifies {own} drafts", f"0 … {row.drafts}", "it has slots for no more"
                )
        spent, should = sum(chosen.lengths), min(flight.budget, room)
        if spent != should:
            was = f"rows verify {list(chosen.lengths)} drafts: {spent}, with a budget of {flight.budget}"
            return Finding(was, f"{should}", "the pass has been planned and priced for so many tokens")
    return True


@checks("DRAFT-07", CONTRACT, "budgets", on=("commit",))
def the_surest_drafts_are_verified(m: EngineMoment) -> Outcome:
    flight = m.committed
    if flight is None or not flight.chosen or len(flight.rows) < 2:
        return None
    for chosen in flight.chosen:
        survivals = [
            survival_of(values, *flight.curve, row.drafts)
            for row, values in zip(flight.rows, chosen.confidences, strict=True)
        ]
        pair = passed_over(chosen.lengths, survivals, m.own_ties)
        if pair is not None:
            (left, position, row), (last, *place) = pair
            was = f"draft {position} of {flight.rows[row].life.name} with survival {-left:.6f} is not verified"
            should = f"before draft {place[0]} of {flight.rows[place[1]].life.name} with {-last:.6f}"
            return Finding(was, should, "greatest survival first, then the earlier position, then the earlier row")
    return True


@checks("DRAFT-08", CONTRACT, "budgets", on=("plan",))
def a_plan_knows_confidences_of_the_request_alone(m: EngineMoment) -> Outcome:
    for name, (values, should) in m.known.items():
        wanted = should or (1.0,) * len(values or ())
        if not are_valid(values or ()) or any(abs(a - b) > 1e-6 for a, b in zip(values or (), wanted, strict=False)):
            was = f"the next budget takes {name} by confidences {_shown(values)}"
            why = "those of another request, or of another round, say nothing of its drafts"
            return Finding(was, f"{_shown(should)}, those of its last committed round", why)
        if should is not None and not values and any(value != 1 for value in should):
            was = f"the next budget knows no confidences of {name}"
            return Finding(was, _shown(should), "a certain row takes the budget of others")
    return True if m.known else None


def _shown(values: tuple[float, ...] | None) -> str:
    return "none" if values is None else str([round(value, 3) for value in values])


@checks("DRAFT-09", CONTRACT, "budgets", on=("plan",))
def the_budget_yields_the_most(m: EngineMoment) -> Outcome:
    flight = m.flight
    if flight is None or flight.budget is None:
        return None
    survivals = [
        survival_of(m.known.get(row.life.name, (None, None))[1], *flight.curve, row.drafts) for row in flight.rows
    ]
    best = []
    for num_sampling, num_tokens in _sizes(flight):
        found = rates(survivals, num_sampling, num_tokens, m.config.costs)
        if found[min(flight.budget, len(found) - 1)] >= max(found) * (1 - 1e-6):
            return True
        best.append(found.index(max(found)))
    was = f"a budget of {flight.budget} drafts for {len(flight.rows)} rows"
    why = f"by their confidences that yields the most tokens in the time of a round, {m.config.costs}"
    return Finding(was, " or ".join(map(str, dict.fromkeys(best))), why)


def _sizes(flight: ModelFlight) -> list[tuple[int, int]]:
    """Return the rows that yield a token and the tokens of a step without its drafts: of its rounds, and also with the
    prompts beside them. An engine may choose by either."""
    rows, prompts = len(flight.rows), sum(len(chunk.tokens) for chunk in flight.chunks)
    return [(rows, rows), (rows + sum(chunk.is_last for chunk in flight.chunks), rows + prompts)]


@checks("DRAFT-10", CONTRACT, "invalid_confidences", on=("commit",))
def what_is_no_probability_is_counted(m: EngineMoment) -> Outcome:
    if m.invalid is None:
        return None
    if m.invalid != m.model.invalid:
        was = f"{m.invalid} rows with confidences that are no probabilities"
        return Finding(was, f"{m.model.invalid}", "a draft that computes NaN would never be noticed")
    return True
