"""The life of a request: ENGINE-01 … 04, 08, 12, 13, and what is delivered: ACCEPT-03, 10, 11, 12."""

from __future__ import annotations

from ..engine.language import GARBAGE
from ..engine.model import RUNNING, WAITING
from ..engine.moment import Moment
from ..engine.operations import Abort, AbortUnknown, Commit, Lose, Plan, Submit, SubmitAgain, SubmitImpossible
from .registry import Finding, Outcome, checks

CONTRACT = "engine"


@checks("ENGINE-01", CONTRACT, general=True)
def every_request_is_in_one_place(m: Moment) -> Outcome:
    waiting, running, model = m.after.waiting, m.after.running, m.model
    places = [*waiting, *running]
    if len(places) != len(model.lives) or set(places) != model.lives.keys():
        twice = sorted({name for name in places if places.count(name) > 1})
        missing = sorted(model.lives.keys() - set(places))
        ghosts = sorted(set(places) - model.lives.keys())
        return Finding(
            f"waiting {list(waiting)}, running {list(running)}",
            f"each of {sorted(model.lives)} once",
            f"twice: {twice}, nowhere: {missing}, ended or unknown: {ghosts}",
        )
    if model.num_accepted != len(places) + model.num_ended:
        return Finding(
            f"{model.num_accepted} were accepted, {len(places)} live and {model.num_ended} have ended",
            "the first is the sum of the others",
            "a request that is nowhere is never answered",
        )
    if m.drained and places:
        return Finding(f"{places} live when all is drained", "nobody", "every request comes to an end")
    return True


@checks("ENGINE-02", CONTRACT)
def a_request_ends_once_and_last(m: Moment) -> Outcome:
    if m.stray:
        return Finding(m.stray[0], "nothing after the end event", "a client has stopped to listen")
    for name, life in m.ended_lives.items():
        if name in m.after.waiting or name in m.after.running:
            return Finding(f"{name} has ended ({life.state}) and is still there", "it is gone", "an end absorbs")
    if m.before.running and m.before.waiting and not m.asked:
        for name in m.after.running:
            if name in m.before.waiting:
                return Finding(f"{name} was admitted by {m.operation}", "by a plan", "only a plan gives rows")
    if m.flight is not None:
        for life in m.flight.lives():
            if life.state is not RUNNING or life.name not in m.after.running:
                return Finding(
                    f"step {m.flight.number} has {life.name}, which is {life.state}",
                    "requests that run",
                    "who waits has nothing to compute on",
                )
    if m.ends:
        wrong = _wrong_end(m)
        if wrong is not None:
            return wrong
    if m.committed is not None and m.refusal is None:
        ended = {end.request: end.reason for end in m.ends}
        for name, (_, reason) in m.expected.items():
            if reason and name not in ended:
                return Finding(f"{name} goes on", f"it ends ({reason})", "it has met its end in this step")
            if reason and ended[name] != reason and reason in ("abort", "error"):
                return Finding(f"{name} ends with {ended[name]}", reason, "the reason is what happened")
            if not reason and name in ended:
                return Finding(f"{name} ends with {ended[name]}", "it goes on", "it has neither stop nor full length")
    return True


def _wrong_end(m: Moment) -> Finding | None:
    """An end for which nobody has given a reason."""
    failed = m.answer.failed if m.answer is not None else _of_lost_steps(m)
    for end in m.ends:
        if end.reason == "abort" and not m.ended_lives[end.request].aborted:
            return Finding(f"{end.request} ends as aborted", "nobody gave it up", "only its client may")
        if end.reason == "error" and end.request not in failed:
            return Finding(f"{end.request} ends with an error", "the device reported none", "it could have gone on")
    if m.answer is None and sum([end.reason == "error" for end in m.ends]) > 1:
        return Finding(
            f"{len(m.ends)} requests end with an error", "one at most", "one step has failed, not all its requests"
        )
    return None


def _of_lost_steps(m: Moment) -> list[str]:
    return [life.name for flight in m.lost_flights for life in flight.lives()]


@checks("ENGINE-03", CONTRACT, on=(Plan, Commit, Abort, Lose))
def what_was_delivered_stays(m: Moment) -> Outcome:
    why = "a client cannot unread a token"
    for end in m.ends:
        life = m.ended_lives[end.request]
        if end.tokens != tuple(life.delivered):
            return Finding(f"{life.name} ends with {list(end.tokens)}", f"what it was given: {life.delivered}", why)
    if m.flight is not None:
        for chunk in m.flight.chunks:
            should = tuple(chunk.life.context[chunk.start : chunk.start + len(chunk.tokens)])
            if chunk.tokens != should:
                return Finding(
                    f"{chunk.life.name} computes {list(chunk.tokens)} from position {chunk.start}",
                    f"{list(should)}: its prompt and what was delivered",
                    "it goes on from another text",
                )
        return True
    for name, got in m.delivered.items():
        should = m.expected.get(name, ([], ""))[0]
        if len(got) > len(should) or got != should[: len(got)]:
            return Finding(f"{name} is given {got}", f"{should}", why)
        if len(got) < len(should) and not m.expected[name][1]:
            return Finding(f"{name} is given {got}", f"{should}", "an accepted token is lost")
    return True if m.delivered or m.ends else None


@checks("ENGINE-04", CONTRACT, "marks", on=(Commit, Abort))
def everything_per_token_is_as_long_as_the_output(m: Moment) -> Outcome:
    found = None
    for end in m.ends:
        life = m.ended_lives[end.request]
        if not life.wish.marks:
            continue
        found = True
        marks = list(end.marks or ())
        if len(marks) != len(end.tokens) or marks != life.marks[: len(marks)]:
            return Finding(
                f"{life.name} ends with {len(end.tokens)} tokens and the marks {marks}",
                f"{life.marks[: len(end.tokens)]}",
                "a value of another token is worse than none",
            )
    return found


@checks("ENGINE-08", CONTRACT, on=(Submit, SubmitImpossible))
def what_can_never_run_is_refused(m: Moment) -> Outcome:
    if m.wish is None:
        return None
    if m.impossible and m.promise is not None:
        return Finding(f"{m.operation} was accepted", f"a refusal: {m.impossible}", "it would wait for ever")
    if m.must_accept and m.promise is None:
        return Finding(f"refused ({m.refusal})", f"accepted: {m.must_accept}", "it could have been served")
    if m.promise is None and m.refusal in ("", "without a reason") and m.impossible:
        return None
    if m.promise is not None and not 1 <= m.promise <= m.wish.max_tokens:
        return Finding(f"{m.promise} tokens are promised", f"1 … {m.wish.max_tokens}", "nobody asked for that")
    return True


@checks("ENGINE-12", CONTRACT, on=(SubmitAgain,))
def a_live_name_is_refused(m: Moment) -> Outcome:
    if m.promise is not None:
        return Finding(f"a second {m.wish.request} was accepted", "a refusal", "two requests share one name")
    if m.after != m.before:
        return Finding(
            f"a refused {m.wish.request} changed {m.before} into {m.after}",
            "nothing changes",
            "the first is unaffected",
        )
    return True


@checks("ENGINE-13", CONTRACT)
def an_abort_releases_everything(m: Moment) -> Outcome:
    if m.lost is not None and m.lost[2] == "abort":
        page, whose, _ = m.lost
        return Finding(
            f"page {page} of {whose}, which was aborted, is neither free nor cached",
            "it comes back when the steps that were in flight are committed",
            "a page that nobody gives back is lost",
        )
    kind = type(m.operation)
    if kind is AbortUnknown:
        if m.abort_events or m.after != m.before:
            return Finding(f"{m.operation} changed something", "nothing", "nobody has that name")
        return True
    if kind is Abort:
        name = m.operation.request
        life = m.model.lives.get(name)
        if m.second_abort_events:
            return Finding(f"a second abort of {name} has events", "none", "an abort is idempotent")
        if life is None:
            return True
        flights = m.model.flights
        if not flights or flights[0].rounds == 1 or life.name not in [row.life.name for row in flights[0].rows]:
            return Finding(f"{name} lives on after its abort", "its end event", "no block that runs has a row of it")
        return True
    for name in m.delivered:
        life = m.model.lives.get(name) or m.ended_lives.get(name)
        if life is not None and life.aborted and m.expected.get(name, ([], ""))[1] != "abort":
            return Finding(f"{name} is given tokens after its abort", "none", "its client is gone")
    if m.committed is not None:
        for row in m.committed.rows:
            if row.life.leaving and row.life.state in (WAITING, RUNNING) and row.stay == row.life.stay:
                return Finding(f"{row.life.name} was aborted and lives on", "its end event", "the block is over")
    return True


@checks("ACCEPT-03", CONTRACT, on=(Commit,))
def greedy_output_is_the_oracles(m: Moment) -> Outcome:
    found = None
    for name, got in m.delivered.items():
        life = m.model.lives.get(name) or m.ended_lives[name]
        if life.wish.seed and GARBAGE not in got:
            continue  # drawn tokens are compared between runs
        found = True
        first, truth = len(life.wish.prompt), life.truth
        truth.reach(first + len(life.delivered))
        at = len(life.delivered) - len(got)
        should = truth.tokens[first + at : first + at + len(got)]
        if got != should:
            reads = f"; {life.row.wrong}" if life.row is not None and life.row.wrong else ""
            return Finding(
                f"{name} is given {got} from its token {at} on{reads}",
                f"{should}, as the model alone says",
                "speculation changes the speed and nothing else",
            )
    return found


@checks("ACCEPT-10", CONTRACT, on=(Commit,))
def the_first_stop_ends_the_output(m: Moment) -> Outcome:
    found = None
    for end in m.ends:
        wish = m.ended_lives[end.request].wish
        if not wish.stop_tokens or end.reason in ("abort", "error"):
            continue
        found = True
        at = next((at for at, token in enumerate(end.tokens) if token in wish.stop_tokens), -1)
        if at >= 0 and (at != len(end.tokens) - 1 or end.reason != "stop"):
            return Finding(
                f"{end.request} ends ({end.reason}) with {list(end.tokens)}",
                f"it stops with token {at}",
                "the first stop wins, also at the length cap",
            )
        if at < 0 and end.reason == "stop":
            return Finding(f"{end.request} ends (stop) with {list(end.tokens)}", "length", "there is no stop in it")
    for name in m.delivered:
        life = m.model.lives.get(name)
        if life is not None and life.wish.stop_tokens and any(t in life.wish.stop_tokens for t in life.delivered):
            return Finding(f"{name} goes on after {life.delivered}", "it has stopped", "nothing follows a stop")
    return found


@checks("ACCEPT-11", CONTRACT, on=(Commit,))
def the_output_is_as_long_as_promised(m: Moment) -> Outcome:
    for name in m.delivered:
        life = m.model.lives.get(name) or m.ended_lives[name]
        room = m.config.context_len - len(life.wish.prompt)
        if len(life.delivered) > min(life.promise, life.wish.max_tokens, room):
            return Finding(
                f"{name} has {len(life.delivered)} tokens",
                f"{life.promise} at most, {room} fit the context",
                "nobody asked for more, and the model sees no further",
            )
    found = None
    for end in m.ends:
        found = True
        life = m.ended_lives[end.request]
        if end.reason == "length" and len(life.delivered) != life.promise:
            return Finding(
                f"{end.request} ends (length) with {len(life.delivered)} tokens",
                f"{life.promise}",
                "without a stop the whole length is due",
            )
    return found


@checks("ACCEPT-12", CONTRACT, "counters", on=(Commit,))
def what_is_counted_is_what_happened(m: Moment) -> Outcome:
    if m.counters is None:
        return None
    verified, proposed, correct = m.counters
    should = (m.model.verified, m.model.proposed, m.model.correct)
    if not 0 <= correct <= proposed or m.counters != should:
        return Finding(
            f"{verified} rows verified, {proposed} drafts proposed, {correct} accepted",
            "{} rows, {} drafts, {} accepted".format(*should),
            "rows that have left, and rounds of others, are not this engine's success",
        )
    return True
