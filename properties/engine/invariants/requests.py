"""The life of a request: ENGINE-01 … 04, 08, 12, 13, and its output: ACCEPT-03, 10, 11, 12."""

from __future__ import annotations

import re

from ...harness.invariants import Finding, Outcome, checks
from ..language import GARBAGE, text
from ..model import RUNNING, RequestLife
from ..observation import EngineMoment

CONTRACT = "engine"


def _life(m: EngineMoment, name: str) -> RequestLife | None:
    """Return a request that lives, or has ended in this operation."""
    return m.model.lives.get(name) or m.ended_lives.get(name)


@checks("ENGINE-01", CONTRACT, general=True)
def every_request_is_in_one_place(m: EngineMoment) -> Outcome:
    waiting, running, model = m.after.waiting, m.after.running, m.model
    places = [*waiting, *running]
    if len(places) != len(model.lives) or set(places) != model.lives.keys():
        twice = sorted({name for name in places if places.count(name) > 1})
        missing = sorted(model.lives.keys() - set(places))
        ghosts = sorted(set(places) - model.lives.keys())
        was, should = f"waiting {list(waiting)}, running {list(running)}", f"each of {sorted(model.lives)} once"
        return Finding(was, should, f"twice: {twice}, nowhere: {missing}, ended or unknown: {ghosts}")
    if model.num_accepted != len(places) + model.num_ended:
        was = f"{model.num_accepted} were accepted, {len(places)} live and {model.num_ended} have ended"
        return Finding(was, "the first is the sum of the others", "a request that is nowhere is never answered")
    if m.drained and places:
        return Finding(f"{places} live when all is drained", "none", "every request comes to an end")
    return True


@checks("ENGINE-02", CONTRACT)
def a_request_ends_once_and_last(m: EngineMoment) -> Outcome:
    if m.stray:
        return Finding(m.stray[0], "nothing after the end event", "the client reads no further")
    for name, life in m.ended_lives.items():
        if name in m.after.waiting or name in m.after.running:
            return Finding(f"{name} has ended ({life.state}) and is still there", "it is gone", "an end is final")
    if m.before.running and m.before.waiting and not m.asked:
        for name in m.after.running:
            if name in m.before.waiting:
                return Finding(f"{name} was admitted by {m.operation}", "by a plan", "only a plan gives rows")
    if m.flight is not None:
        for life in m.flight.lives():
            if life.state is not RUNNING or life.name not in m.after.running:
                was = f"step {m.flight.number} has {life.name}, which is {life.state}"
                return Finding(was, "requests that run", "a waiting request has no row to compute on")
    wrong = _wrong_end(m) if m.ends or m.loss is not None else None
    if wrong is not None:
        return wrong
    if m.committed is not None and m.refusal is None:
        ended = {end.request: end.reason for end in m.ends}
        for name, (_, reason) in m.expected.items():
            if reason and name not in ended:
                return Finding(f"{name} goes on", f"it ends ({reason})", "its end came in this step")
            if reason in ("abort", "error") and ended[name] != reason:
                return Finding(f"{name} ends with {ended[name]}", reason, "the event must say why")
            if not reason and name in ended:
                return Finding(f"{name} ends with {ended[name]}", "it goes on", "it has neither stop nor full length")
    return True


def _wrong_end(m: EngineMoment) -> Finding | None:
    if m.answer is not None:
        failed = m.answer.failed
    else:
        failed = [life.name for flight in m.lost_flights for life in flight.lives()]
    for end in m.ends:
        if end.reason == "abort" and not m.ended_lives[end.request].aborted:
            return Finding(f"{end.request} ends as aborted", "its client did not abort it", "only its client may")
        if end.reason == "error" and end.request not in failed:
            return Finding(f"{end.request} ends with an error", "the device reported none", "it could have gone on")
    if m.loss is not None:
        blamed = [m.loss.blamed.name] if m.loss.blamed is not None else []
        failed = [end.request for end in m.ends if end.reason == "error"]
        if failed != blamed:
            should = f"{blamed}: who was alone in a failed step than which none is smaller"
            was = f"{failed} end with an error"
            return Finding(was, should, "an innocent request would fail, or a guilty one go on")
        if sorted(m.after.running) != sorted(m.loss.running):
            was, should = f"{list(m.after.running)} run on after a failed step", f"{list(m.loss.running)}"
            return Finding(was, should, "the most entitled keep what they have, as many as there may be rows")
    if m.answer is None and sum([end.reason == "error" for end in m.ends]) > 1:
        was = f"{len(m.ends)} requests end with an error"
        return Finding(was, "one at most", "one step has failed, not all its requests")
    return None


@checks("ENGINE-03", CONTRACT, on=("plan", "commit", "abort", "lose"))
def what_was_delivered_stays(m: EngineMoment) -> Outcome:
    why = "a client cannot unread a token"
    for end in m.ends:
        life = m.ended_lives[end.request]
        if end.tokens != tuple(life.delivered):
            return Finding(f"{life.name} ends with {list(end.tokens)}", f"what it was given: {life.delivered}", why)
    if m.flight is not None:
        for chunk in m.flight.chunks:
            should = tuple(chunk.life.context[chunk.start : chunk.stop])
            if chunk.tokens != should:
                was = f"{chunk.life.name} computes {list(chunk.tokens)} from position {chunk.start}"
                return Finding(
                    was, f"{list(should)}: its prompt and what was delivered", "it goes on from another text"
                )
        return True
    for name, got in m.delivered.items():
        should, reason = m.expected.get(name, ([], ""))
        if len(got) > len(should) or got != should[: len(got)]:
            return Finding(f"{name} is given {got}", f"{should}", why)
        if not reason and len(got) < len(should):
            return Finding(f"{name} is given {got}", f"{should}", "an accepted token is lost")
    return True if m.delivered or m.ends else None


@checks("ENGINE-04", CONTRACT, "marks", on=("commit", "abort"))
def everything_per_token_is_as_long_as_the_output(m: EngineMoment) -> Outcome:
    found = None
    for end in m.ends:
        life = m.ended_lives[end.request]
        if not life.wish.marks:
            continue
        found = True
        marks = list(end.marks or ())
        if len(marks) != len(end.tokens) or marks != life.marks[: len(marks)]:
            was = f"{life.name} ends with {len(end.tokens)} tokens and the marks {marks}"
            return Finding(was, f"{life.marks[: len(end.tokens)]}", "a value of another token is worse than none")
    return found


@checks("ENGINE-08", CONTRACT, on=("submit", "submit-impossible", "submit-again"))
def what_can_never_run_is_refused(m: EngineMoment) -> Outcome:
    if m.wish is None:
        return None
    if m.promise is None:
        reason = m.refusal.partition(": ")[2]
        if not reason.strip():
            was = "refused without a reason"
            return Finding(was, "an error whose text says why", "a client cannot mend its request")
        # Which of several reasons is named is the engine's choice; where only size or queue are in the way, it is one
        # of these.
        is_sound = m.operation.tag == "submit" and m.wish.prompt and m.wish.max_tokens > 0
        named = {int(number) for number in re.findall(r"\d+", reason)}
        # Without a limit in its way it must be accepted.
        if is_sound and m.has_reasons and m.limits and not m.limits & named:
            was, should = f"refused ({reason})", f"a reason with the limit, one of {_span(m.limits)}"
            return Finding(was, should, "a client cannot tell by how much its request is too large")
    if m.operation.tag == "submit-again":
        return True
    if m.impossible and m.promise is not None:
        return Finding(f"{m.operation} was accepted", f"a refusal: {m.impossible}", "it would wait for ever")
    if m.must_accept and m.promise is None:
        return Finding(f"refused ({m.refusal})", f"accepted: {m.must_accept}", "it could have been served")
    if m.promise is not None and not 1 <= m.promise <= m.wish.max_tokens:
        return Finding(f"{m.promise} tokens are promised", f"1 … {m.wish.max_tokens}", "that was not asked for")
    return True


def _span(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} … {most}"


@checks("ENGINE-12", CONTRACT, "misuse", on=("submit-again",))
def a_live_name_is_refused(m: EngineMoment) -> Outcome:
    name = m.wish.request
    if m.promise is not None:
        return Finding(f"a second {name} was accepted", "a refusal", "two requests share one name")
    if m.after != m.before:
        was = f"a refused {name} changed {m.before} into {m.after}"
        return Finding(was, "nothing changes", "the first is unaffected")
    return True


@checks("ENGINE-13", CONTRACT)
def an_abort_releases_everything(m: EngineMoment) -> Outcome:
    if m.model.lingering and m.leak_from == "abort":
        was = f"page {m.leaked[0]} of {m.leaked[1]}, which was aborted, is neither free nor cached"
        should = "it comes back when the steps that were in flight are committed"
        return Finding(was, should, "a page that is never given back is lost")
    tag = getattr(m.operation, "tag", "")
    if tag == "abort-unknown":
        if m.abort_events or m.after != m.before:
            return Finding(f"{m.operation} changed something", "nothing", "there is no such request")
        return True
    if tag == "abort":
        name = m.operation.request
        if m.second_abort_events:
            return Finding(f"a second abort of {name} has events", "none", "an abort is idempotent")
        flights = m.model.flights
        if name not in m.model.lives:
            return True
        if not flights or flights[0].rounds == 1 or name not in [row.life.name for row in flights[0].rows]:
            return Finding(
                f"{name} lives on after its abort", "its end event", "no multi-step that runs has a row of it"
            )
        return True
    for name in m.delivered:
        life = _life(m, name)
        if life is not None and life.aborted and m.expected.get(name, ([], ""))[1] != "abort":
            return Finding(f"{name} is given tokens after its abort", "none", "its client is gone")
    over = (m.committed,) if m.committed is not None else m.lost_flights
    for row in [row for flight in over for row in flight.rows]:
        if row.life.leaving and row.life.is_live and row.is_present:
            return Finding(f"{row.life.name} was aborted and lives on", "its end event", "the multi-step is over")
    return True


@checks("ACCEPT-03", CONTRACT, on=("commit",))
def greedy_output_is_the_oracles(m: EngineMoment) -> Outcome:
    found = None
    for name, got in m.delivered.items():
        life = _life(m, name)
        if life.wish.seed and GARBAGE not in got:
            continue  # drawn tokens are compared between runs
        found = True
        stop = len(life.wish.prompt) + len(life.delivered)
        life.truth.reach(stop)
        should = life.truth.tokens[stop - len(got) : stop]
        if got != should:
            reads = f"; {life.row.wrong}" if life.row is not None and life.row.wrong else ""
            was = f"{name} is given {got} from its token {len(life.delivered) - len(got)} on{reads}"
            return Finding(was, f"{should}, as the model alone says", "speculation changes the speed and nothing else")
    return found


@checks("ACCEPT-10", CONTRACT, on=("commit",))
def the_first_stop_ends_the_output(m: EngineMoment) -> Outcome:
    found = None
    for end in m.ends:
        life = m.ended_lives[end.request]
        if not life.has_stops or end.reason in ("abort", "error"):
            continue
        found = True
        was = f"{end.request} ends ({end.reason}) with {list(end.tokens)}"
        if life.wish.stop_strings:
            was += f", whose text is {text(end.tokens)!r}; it asked for {', '.join(map(repr, life.wish.stop_strings))}"
        at = life.first_stop((), end.tokens)
        if at >= 0 and (at != len(end.tokens) - 1 or end.reason != "stop"):
            return Finding(was, f"it stops with token {at}", "the first stop wins, also at the length cap")
        if at < 0 and end.reason == "stop":
            return Finding(was, "length", "there is no stop in it")
    for name in m.delivered:
        life = m.model.lives.get(name)
        if life is not None and life.has_stops and life.first_stop((), life.delivered) >= 0:
            return Finding(f"{name} goes on after {life.delivered}", "it has stopped", "nothing follows a stop")
    return found


@checks("ACCEPT-11", CONTRACT, on=("commit", "submit"))
def the_output_is_as_long_as_promised(m: EngineMoment) -> Outcome:
    if m.promise is not None:
        least, most = m.promises
        if not least <= m.promise <= most:
            was = f"{m.promise} tokens are promised for a prompt of {len(m.wish.prompt)} and {m.wish.max_tokens} wanted"
            should = f"{least}" if least == most else f"{least} … {most}"
            return Finding(was, should, "what is wanted and fits is due, and no more than fits")
        return True
    for name in m.delivered:
        life = _life(m, name)
        room = m.config.context_len - len(life.wish.prompt)
        if len(life.delivered) > min(life.promise, life.wish.max_tokens, room):
            was, should = f"{name} has {len(life.delivered)} tokens", f"{life.promise} at most, {room} fit the context"
            return Finding(was, should, "no more were asked for, and the model sees no further")
    for end in m.ends:
        life = m.ended_lives[end.request]
        if end.reason == "length" and len(life.delivered) != life.promise:
            was = f"{end.request} ends (length) with {len(life.delivered)} tokens"
            return Finding(was, f"{life.promise}", "without a stop the whole length is due")
    return True if m.ends else None


@checks("ACCEPT-12", CONTRACT, "counters", on=("commit",))
def counters_count_what_happened(m: EngineMoment) -> Outcome:
    if m.lessons is not None and m.committed is not None and m.answer is not None:
        lessons = ((len(m.committed.rows), m.committed.steps),) * len(m.answer.runs)
        if m.lessons != lessons:
            was = f"the choice of draft steps got (rows, draft steps) {list(m.lessons)}"
            return Finding(was, f"{list(lessons)}, of the committed rounds", "it chooses by the size of a batch")
    if m.counters is None:
        return None if m.lessons is None else True
    verified, proposed, correct = m.counters
    should = (m.model.verified, m.model.proposed, m.model.correct)
    if not 0 <= correct <= proposed or m.counters != should:
        was = f"{verified} rows verified, {proposed} drafts proposed, {correct} accepted"
        should = "{} rows, {} drafts, {} accepted".format(*should)
        return Finding(was, should, "rows that have left are not this engine's success")
    return True
