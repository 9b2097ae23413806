"""Logs that were falsified: each function changes the records of a true one, and says at which place which invariant
must be found broken."""

import json
from itertools import pairwise


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(records, kind, key=None):
    return [i for i, record in enumerate(records) if record["t"] == kind and (key is None or key in record)]


def commit_of(records, plan):
    """The place of the commit of the step that is planned at a place."""
    return next(i for i in places(records, "commit") if records[i]["step"] == records[plan]["step"])


def changed(name, id, kind, key, number, change):
    """Return a falsification of the record that is the `number`-th of its kind with this key:
    where it stands `id` is broken."""

    def tamper(records):
        place = places(records, kind, key)[number]
        change(records[place])
        return place, id

    tamper.__name__ = name
    return tamper


def repeated(name, id, kind, key, number):
    """Return a falsification that writes a record a second time."""

    def tamper(records):
        place = places(records, kind, key)[number]
        records.insert(place + 1, dict(records[place]))
        return place + 1, id

    tamper.__name__ = name
    return tamper


def add(values, key, amount):
    values[key] += amount


def begin_with(record, digit):
    assert isinstance(record["lens"], str)
    record["lens"] = digit + record["lens"][1:]


def forget_the_rounds(record):
    del record["rounds"], record["lens"]
    record["at"] = record["ns"]


def begin_the_chunk_later(record):
    add(record["prefill"][0], 1, 1)
    add(record["prefill"][0], 2, -1)


IN_ONE_RECORD = [
    repeated("commit_twice", "RELAY-07", "commit", None, 5),
    repeated("plan_twice", "RELAY-07", "plan", "decode", 3),
    repeated("same_id_accepted", "ENGINE-12", "submit", None, 0),
    changed("end_lost", "ENGINE-02", "commit", "finished", 0, lambda r: r.pop("finished")),
    changed("token_lost", "ACCEPT-12", "commit", "finished", 3, lambda r: add(r["finished"][0], 2, -1)),
    changed("stop_is_logged_as_length", "ACCEPT-10", "commit", "finished", 0, lambda r: r["finished"][0].__setitem__(1, "length")),
    changed("end_without_a_reason", "ACCEPT-10", "commit", "finished", 0, lambda r: [r.pop(k, None) for k in ("stops", "stopped")]),
    changed("more_than_was_asked_for", "ACCEPT-11", "plan", "joins", 0, lambda r: r["joins"][0].__setitem__(5, 10**9)),
    changed("over_long_run", "ACCEPT-02", "commit", "lens", 0, lambda r: begin_with(r, "z")),
    changed("empty_run", "ACCEPT-02", "commit", "lens", 0, lambda r: begin_with(r, "0")),
    changed("time_goes_back", "SIM-02", "plan", None, 9, lambda r: add(r, "ns", -(10**12))),
    changed("chunk_left_out", "ENGINE-14", "plan", "prefill", 0, begin_the_chunk_later),
    changed("queue_miscounted", "ENGINE-01", "plan", None, 4, lambda r: add(r, "waiting", 1)),
    changed("more_than_the_pool", "ALLOC-01", "plan", None, 4, lambda r: r.update(held=10**9)),
    changed("too_long_a_prompt", "ENGINE-08", "submit", None, 0, lambda r: r.update(prompt={"length": 10**8})),
    changed("result_of_another_batch", "RELAY-07", "commit", "lens", 3, lambda r: r.update(lens=[1] * 77)),
    changed("result_without_its_rounds", "RELAY-07", "commit", "lens", 3, forget_the_rounds),
]  # fmt: skip
TOKEN_LOST, QUEUE_MISCOUNTED = (
    next(t for t in IN_ONE_RECORD if t.__name__ == n) for n in ("token_lost", "queue_miscounted")
)


def end_twice(records):
    place = places(records, "commit", "finished")[0]
    later = next(i for i in places(records, "commit") if i > place)
    records[later].setdefault("finished", []).append(records[place]["finished"][0])
    return later, "ENGINE-02"


def goes_on_past_its_length(records):
    place = places(records, "plan", "joins")[0]
    records[place]["joins"][0][5] = 3
    return places(records, "commit", "lens")[0], "ENGINE-02"


def commit_lost(records):
    place = places(records, "commit", "lens")[7]
    del records[place]
    return next(i for i in places(records, "plan", "S") if i >= place), "RELAY-07"


def commits_swapped(records):
    first, second = next(
        (i, j)
        for i, j in pairwise(places(records, "commit"))
        if any(p < i for p in places(records, "plan") if records[p]["step"] == records[j]["step"])
    )
    records[first], records[second] = records[second], records[first]
    return first, "RELAY-07"


def round_of_negative_length(records):
    place = next(
        i for i in places(records, "commit") if isinstance(records[i]["at"], list) and len(records[i]["at"]) > 2
    )
    at = records[place]["at"]
    at[1], at[2] = -at[1], at[2] + 2 * at[1]
    return place, "SIM-02"


def token_after_the_end(records):
    """A later step is planned for a row whose request has ended and whose end was committed."""
    ended = places(records, "commit", "finished")[0]
    row = next(join[1] for i in places(records, "plan", "joins") for join in records[i]["joins"])
    for place in places(records, "plan", "decode"):
        if place > ended and records[place]["decode"] != "=" and row not in records[place]["decode"]:
            break
    records[place]["decode"] = [*records[place]["decode"], row]
    commit = records[commit_of(records, place)]
    commit["lens"] = [1] * (commit["rounds"] * len(records[place]["decode"]))
    return place, "ENGINE-02"


def row_given_twice(records):
    joins = places(records, "plan", "joins")
    row = records[joins[0]]["joins"][0][1]
    records[joins[1]]["joins"][0][1] = row
    return joins[1], "ALLOC-06"


def old_epoch(records):
    seen = set()
    for place in places(records, "plan", "joins"):
        for join in records[place]["joins"]:
            if join[1] in seen:
                join[2] = 1
                return place, "RELAY-03"
            seen.add(join[1])
    raise AssertionError("no row is used twice")


def joined_twice(records):
    joins = places(records, "plan", "joins")
    records[joins[1]]["joins"].append([*records[joins[0]]["joins"][0][:1], 77, 1, 0, 0, 5])
    return joins[1], "ENGINE-02"


def row_decoded_twice(records):
    place = next(i for i in places(records, "plan", "decode") if records[i]["decode"] != "=")
    records[place]["decode"] = records[place]["decode"] * 2
    commit = records[commit_of(records, place)]
    commit["lens"] = [1] * (commit["rounds"] * len(records[place]["decode"]))
    return place, "ENGINE-05"


def decodes_before_its_prompt(records):
    place = places(records, "plan", "prefill")[0]
    records[place]["prefill"][0][2] -= 1
    records[place]["prefill"][0][3] = 0
    later = next(i for i in places(records, "plan", "decode") if i > place)
    return later, "ENGINE-02"


def never_ends(records):
    last = places(records, "submit")[-1]
    records.insert(last + 1, {**records[last], "id": "never ends"})
    for plan in places(records, "plan"):
        records[plan]["waiting"] += plan > last
    return len(records) - 1, "ENGINE-02"


def a_block_goes_on(records):
    """Two rounds more after the one in which a request has met its stop."""
    for place in places(records, "commit", "stops"):
        record = records[place]
        if record["rounds"] > 2 and isinstance(record["lens"], str):
            record["stops"] = [[0, stop[1], 0] for stop in record["stops"]]
            return place, "SIM-12"
    raise AssertionError("no block ends with a stop")


def too_many_rounds(records):
    place = next(i for i in places(records, "plan", "decode") if records[i]["rounds"] > 2)
    commit = next(i for i in places(records, "commit", "lens") if records[i]["step"] == records[place]["step"])
    records[place]["rounds"] = 1
    return commit, "SIM-12"


def released_under_a_step(records):
    """A row is released by the plan behind the step that decodes it."""
    place = next(i for i in places(records, "plan", "joins"))
    row, epoch = records[place]["joins"][0][1:3]
    later = next(i for i in places(records, "plan") if i > place and records[i]["step"])
    records[later]["released"] = [[row, epoch]]
    return later, "RELAY-01"


def plan_lost(records):
    place = places(records, "plan", "decode")[6]
    del records[place]
    return next(i for i in places(records, "plan") if i >= place), "RELAY-07"


def result_before_its_plan(records):
    place = next(i for i in places(records, "commit") if isinstance(records[i]["at"], int))
    records[place]["at"] = 1
    return place, "SIM-02"


TAMPERINGS = [
    *IN_ONE_RECORD, plan_lost, end_twice, goes_on_past_its_length, commit_lost, commits_swapped, result_before_its_plan,
    round_of_negative_length, token_after_the_end, row_given_twice, old_epoch, joined_twice, row_decoded_twice,
    decodes_before_its_prompt, never_ends, a_block_goes_on, too_many_rounds, released_under_a_step,
]  # fmt: skip


def delivered_again(records):
    """A retracted request begins again with fewer tokens than it has delivered."""
    for place in places(records, "plan", "joins"):
        for join in records[place]["joins"]:
            if join[4]:
                join[4] -= 1
                return place, "ENGINE-03"
    raise AssertionError("no request was retracted")


def jumps_the_queue(records):
    """Who came later enters first: two joins, one after the other, exchange their requests."""
    submits = {records[i]["id"]: i for i in places(records, "submit")}
    joins = [(i, j) for i in places(records, "plan", "joins") for j in records[i]["joins"]]
    for (i, one), (j, other) in pairwise(joins):
        if i < j and submits[other[0]] < i and submits[one[0]] < submits[other[0]]:
            one[0], other[0] = other[0], one[0]
            return i, "ENGINE-16"
    raise AssertionError("no request waits")


OF_RETRACTIONS = [
    delivered_again,
    changed("retracted_twice", "ENGINE-02", "plan", "retracted", 0, lambda r: r.update(retracted=r["retracted"] * 2)),
    jumps_the_queue,
]
